"""Right functions to break: templates whose names say what the function is for.

A template's text has slots in braces: `{a}`, `{b}` are argument names, `{acc}`, `{i}`, `{x}`, `{out}` local ones, and
`{K}` a small constant whose word `{KW}` is part of the function's name where the name depends on it. `names` are
the ways to call the function; `arguments` says what its tests pass, in order.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FunctionTemplate:
    """One function with slots.

    Attributes:
        names: Function names to choose from; may hold `{KW}`.
        arguments: Kind of each argument: `int`, `nat`, `pos`, `digit`, `year`, `ints`, `nums2` (two or more integers),
            `word`, `words`, `text`, `char` or `flag`.
        body: Text after the `def` line, indented by four spaces, with slots; arguments are `{a}`, `{b}`, `{c}`.
    """

    names: str
    arguments: tuple[str, ...]
    body: str


_TEXT = """
add add_two plus sum_two (int, int)
    {out} = {a} + {b}
    return {out}

subtract minus difference less_by (int, int)
    {out} = {a} - {b}
    return {out}

multiply times product_of (int, int)
    {out} = {a} * {b}
    return {out}

times_{KW} {KW}_times scale_by_{KW} (int)
    {out} = {a} * {K}
    return {out}

add_{KW} plus_{KW} shift_by_{KW} (int)
    {out} = {a} + {K}
    return {out}

minus_{KW} take_{KW} down_by_{KW} (int)
    {out} = {a} - {K}
    return {out}

divide_by_{KW} split_in_{KW} (nat)
    {out} = {a} // {K}
    return {out}

last_digit ones_digit (nat)
    {out} = {a} % 10
    return {out}

double twice (int)
    return {a} * 2

square squared (int)
    {out} = {a} * {a}
    return {out}

cube cubed (int)
    {out} = {a} * {a} * {a}
    return {out}

is_even even (int)
    return {a} % 2 == 0

is_odd odd (int)
    return {a} % 2 == 1

is_multiple_of_{KW} divisible_by_{KW} (nat)
    {x} = {a} % {K}
    return {x} == 0

average mean_of_two middle (int, int)
    {out} = {a} + {b}
    return {out} // 2

area rect_area (pos, pos)
    {out} = {a} * {b}
    return {out}

perimeter rect_border (pos, pos)
    {out} = {a} + {b}
    return {out} * 2

larger bigger max_two (int, int)
    if {a} > {b}:
        return {a}
    return {b}

smaller lesser min_two (int, int)
    if {a} < {b}:
        return {a}
    return {b}

at_least reaches (int, int)
    return {a} >= {b}

at_most within (int, int)
    return {a} <= {b}

absolute magnitude (int)
    if {a} < 0:
        return -{a}
    return {a}

sign sign_of (int)
    if {a} > 0:
        return 1
    if {a} < 0:
        return -1
    return 0

clamp limit_to (int, int, int)
    {out} = max({a}, {b})
    {out} = min({out}, {c})
    return {out}

cap at_most_{KW} (nat)
    if {a} > {K}:
        return {K}
    return {a}

is_between between in_range (int, int, int)
    return {b} <= {a} and {a} <= {c}

is_outside outside out_of_range (int, int, int)
    return {a} < {b} or {a} > {c}

both_positive all_positive_two (int, int)
    return {a} > 0 and {b} > 0

any_negative either_negative (int, int)
    return {a} < 0 or {b} < 0

exactly_one only_one (flag, flag)
    return ({a} or {b}) and not ({a} and {b})

neither none_of (flag, flag)
    return not {a} and not {b}

distance gap between_points (int, int)
    {out} = {a} - {b}
    if {out} < 0:
        {out} = -{out}
    return {out}

sum_to total_to add_up_to (nat)
    {acc} = 0
    for {i} in range({a} + 1):
        {acc} += {i}
    return {acc}

sum_below total_below (nat)
    {acc} = 0
    for {i} in range({a}):
        {acc} += {i}
    return {acc}

sum_between sum_from_to (nat, nat)
    {acc} = 0
    for {i} in range({a}, {b} + 1):
        {acc} += {i}
    return {acc}

factorial fact (digit)
    {acc} = 1
    for {i} in range(1, {a} + 1):
        {acc} *= {i}
    return {acc}

power raise_to (digit, digit)
    {acc} = 1
    for {i} in range({b}):
        {acc} *= {a}
    return {acc}

sum_squares squares_total (digit)
    {acc} = 0
    for {i} in range(1, {a} + 1):
        {acc} += {i} * {i}
    return {acc}

evens_to even_numbers (nat)
    {out} = []
    for {i} in range({a} + 1):
        if {i} % 2 == 0:
            {out}.append({i})
    return {out}

count_down countdown (digit)
    {out} = []
    for {i} in range({a}, 0, -1):
        {out}.append({i})
    return {out}

total sum_list add_all (ints)
    {acc} = 0
    for {x} in {a}:
        {acc} += {x}
    return {acc}

product multiply_all (ints)
    {acc} = 1
    for {x} in {a}:
        {acc} *= {x}
    return {acc}

largest highest maximum (nums2)
    {acc} = {a}[0]
    for {x} in {a}:
        if {x} > {acc}:
            {acc} = {x}
    return {acc}

smallest lowest minimum (nums2)
    {acc} = {a}[0]
    for {x} in {a}:
        if {x} < {acc}:
            {acc} = {x}
    return {acc}

count_above num_above (ints, int)
    {acc} = 0
    for {x} in {a}:
        if {x} > {b}:
            {acc} += 1
    return {acc}

count_below num_below (ints, int)
    {acc} = 0
    for {x} in {a}:
        if {x} < {b}:
            {acc} += 1
    return {acc}

count_equal occurrences (ints, int)
    {acc} = 0
    for {x} in {a}:
        if {x} == {b}:
            {acc} += 1
    return {acc}

count_positive num_positive (ints)
    {acc} = 0
    for {x} in {a}:
        if {x} > 0:
            {acc} += 1
    return {acc}

sum_even add_evens (ints)
    {acc} = 0
    for {x} in {a}:
        if {x} % 2 == 0:
            {acc} += {x}
    return {acc}

keep_above filter_above (ints, int)
    {out} = []
    for {x} in {a}:
        if {x} > {b}:
            {out}.append({x})
    return {out}

drop_negative without_negative (ints)
    {out} = []
    for {x} in {a}:
        if {x} >= 0:
            {out}.append({x})
    return {out}

double_all scale_all (ints)
    {out} = []
    for {x} in {a}:
        {out}.append({x} * 2)
    return {out}

add_to_all shift_all (ints, int)
    {out} = []
    for {x} in {a}:
        {out}.append({x} + {b})
    return {out}

squares square_all (ints)
    return [{x} * {x} for {x} in {a}]

positives only_positive (ints)
    return [{x} for {x} in {a} if {x} > 0]

first head first_item (nums2)
    {out} = {a}[0]
    return {out}

second second_item (nums2)
    {out} = {a}[1]
    return {out}

last last_item final (nums2)
    {out} = {a}[-1]
    return {out}

first_{KW} take_{KW} head_{KW} (ints)
    return {a}[:{K}]

skip_{KW} drop_{KW} after_{KW} (ints)
    return {a}[{K}:]

all_but_last init_part (ints)
    return {a}[:-1]

rest tail_of all_but_first (ints)
    return {a}[1:]

reverse backwards (ints)
    return {a}[::-1]

every_other every_second (ints)
    return {a}[::2]

first_plus_last ends_sum (nums2)
    {out} = {a}[0] + {a}[-1]
    return {out}

spread value_range (nums2)
    {out} = max({a}) - min({a})
    return {out}

mean average_of (nums2)
    {acc} = sum({a})
    return {acc} / len({a})

deltas steps differences (nums2)
    {out} = []
    for {i} in range(1, len({a})):
        {out}.append({a}[{i}] - {a}[{i} - 1])
    return {out}

running_total prefix_sums (ints)
    {acc} = 0
    {out} = []
    for {x} in {a}:
        {acc} += {x}
        {out}.append({acc})
    return {out}

pair_sums add_lists (ints, ints)
    {out} = []
    for {x}, {i} in zip({a}, {b}):
        {out}.append({x} + {i})
    return {out}

dot dot_product (ints, ints)
    {acc} = 0
    for {x}, {i} in zip({a}, {b}):
        {acc} += {x} * {i}
    return {acc}

is_sorted ascending (ints)
    for {i} in range(len({a}) - 1):
        if {a}[{i}] > {a}[{i} + 1]:
            return False
    return True

index_of find_index position (ints, int)
    for {i} in range(len({a})):
        if {a}[{i}] == {b}:
            return {i}
    return -1

contains has_item (ints, int)
    for {x} in {a}:
        if {x} == {b}:
            return True
    return False

all_above every_above (ints, int)
    for {x} in {a}:
        if {x} <= {b}:
            return False
    return True

any_zero has_zero (ints)
    for {x} in {a}:
        if {x} == 0:
            return True
    return False

unique distinct (ints)
    {out} = []
    for {x} in {a}:
        if {x} not in {out}:
            {out}.append({x})
    return {out}

common shared_items (ints, ints)
    {out} = []
    for {x} in {a}:
        if {x} in {b}:
            {out}.append({x})
    return {out}

concat join_lists (ints, ints)
    {out} = list({a})
    {out}.extend({b})
    return {out}

interval_length span_length (int, int)
    {out} = {b} - {a}
    return {out} + 1

digit_sum sum_digits (nat)
    {acc} = 0
    while {a} > 0:
        {acc} += {a} % 10
        {a} //= 10
    return {acc}

num_digits count_digits (pos)
    {acc} = 0
    while {a} > 0:
        {acc} += 1
        {a} //= 10
    return {acc}

halvings times_halved (pos)
    {acc} = 0
    while {a} > 1:
        {a} //= 2
        {acc} += 1
    return {acc}

gcd common_divisor (pos, pos)
    while {b} > 0:
        {a}, {b} = {b}, {a} % {b}
    return {a}

fib fibonacci (digit)
    {x}, {i} = 0, 1
    for {acc} in range({a}):
        {x}, {i} = {i}, {x} + {i}
    return {x}

is_prime prime (nat)
    if {a} < 2:
        return False
    for {i} in range(2, {a}):
        if {a} % {i} == 0:
            return False
    return True

divisors factors (pos)
    {out} = []
    for {i} in range(1, {a} + 1):
        if {a} % {i} == 0:
            {out}.append({i})
    return {out}

repeat_text repeat (word, digit)
    {out} = ''
    for {i} in range({b}):
        {out} += {a}
    return {out}

greet hello (word)
    {out} = 'hello ' + {a}
    return {out}

full_name join_names (word, word)
    {out} = {a} + ' ' + {b}
    return {out}

initial first_letter (word)
    return {a}[0]

last_letter final_letter (word)
    return {a}[-1]

first_letters prefix_{KW} (word)
    return {a}[:{K}]

shout upper_text loud (word)
    return {a}.upper() + '!'

whisper lower_text (word)
    {out} = {a}.lower()
    return {out}

count_char char_count (word, char)
    {acc} = 0
    for {x} in {a}:
        if {x} == {b}:
            {acc} += 1
    return {acc}

count_vowels num_vowels (word)
    {acc} = 0
    for {x} in {a}:
        if {x} in 'aeiou':
            {acc} += 1
    return {acc}

without_char drop_char (word, char)
    {out} = ''
    for {x} in {a}:
        if {x} != {b}:
            {out} += {x}
    return {out}

is_palindrome palindrome (word)
    {out} = {a}[::-1]
    return {out} == {a}

starts_with begins (word, char)
    return {a}.startswith({b})

ends_with finishes (word, char)
    return {a}.endswith({b})

word_count num_words (text)
    {out} = {a}.split()
    return len({out})

last_word final_word (text)
    {out} = {a}.split()
    return {out}[-1]

first_word opening_word (text)
    {out} = {a}.split()
    return {out}[0]

trim_left strip_left (text)
    return (' ' + {a}).lstrip()

longest longest_word (words)
    {out} = ''
    for {x} in {a}:
        if len({x}) > len({out}):
            {out} = {x}
    return {out}

lengths sizes (words)
    return [len({x}) for {x} in {a}]

long_words keep_long (words)
    return [{x} for {x} in {a} if len({x}) > {K}]

total_length letters_total (words)
    {acc} = 0
    for {x} in {a}:
        {acc} += len({x})
    return {acc}

join_words to_sentence (words)
    return ' '.join({a})

number_words enumerate_words (words)
    {out} = []
    for {i}, {x} in enumerate({a}, 1):
        {out}.append(str({i}) + {x})
    return {out}

tally count_each (words)
    {out} = {{}}
    for {x} in {a}:
        {out}[{x}] = {out}.get({x}, 0) + 1
    return {out}

swap_pair flip_pair (int, int)
    {out} = ({b}, {a})
    return {out}

price_with_tax with_tax (pos, pos)
    {out} = {a} * {b} // 100
    return {a} + {out}

discounted after_discount (pos, digit)
    {out} = {a} * {b} // 100
    return {a} - {out}

seconds to_seconds (nat, nat)
    {out} = {a} * 60
    return {out} + {b}

minutes_left remaining (nat, nat)
    {out} = {a} - {b}
    if {out} < 0:
        {out} = 0
    return {out}

grade pass_or_fail (nat)
    if {a} >= {K}0:
        return 'pass'
    return 'fail'

leap_year is_leap (year)
    if {a} % 400 == 0:
        return True
    if {a} % 100 == 0:
        return False
    return {a} % 4 == 0

fizz is_fizz (nat)
    return {a} % 3 == 0 and {a} % 5 != 0

wrap_index cyclic (nat, pos)
    {out} = {a} % {b}
    return {out}

pages num_pages (nat, pos)
    {out} = ({a} + {b} - 1) // {b}
    return {out}

collatz_steps collatz (pos)
    {acc} = 0
    while {a} != 1:
        if {a} % 2 == 0:
            {a} = {a} // 2
        else:
            {a} = 3 * {a} + 1
        {acc} += 1
    return {acc}

sum_odd_index odd_places (ints)
    {acc} = 0
    for {i} in range(len({a})):
        if {i} % 2 == 1:
            {acc} += {a}[{i}]
    return {acc}

merge_max pairwise_max (ints, ints)
    return [max({x}, {i}) for {x}, {i} in zip({a}, {b})]

weighted weighted_sum (ints)
    {acc} = 0
    for {i}, {x} in enumerate({a}):
        {acc} += {i} * {x}
    return {acc}
"""


def _parse(text: str) -> tuple[FunctionTemplate, ...]:
    templates = []
    for block in text.strip("\n").split("\n\n"):
        head, _, body = block.partition("\n")
        names, _, arguments = head.rstrip(")").partition(" (")
        templates.append(FunctionTemplate(names, tuple(arguments.split(", ")), body))
    return tuple(templates)


TEMPLATES: tuple[FunctionTemplate, ...] = _parse(_TEXT)

ARGUMENT_NAMES: dict[str, tuple[str, ...]] = {
    "int": ("a", "b", "x", "y", "p", "q", "u", "v", "left", "right", "value", "other"),
    "nat": ("n", "m", "num", "k", "count", "amount"),
    "pos": ("n", "m", "w", "h", "size", "num"),
    "digit": ("n", "m", "k", "d", "times", "num"),
    "year": ("year", "y", "n"),
    "ints": ("items", "values", "nums", "data", "xs", "ys", "row"),
    "nums2": ("items", "values", "nums", "data", "xs", "row"),
    "word": ("s", "word", "text", "name", "t"),
    "words": ("words", "names", "parts", "texts"),
    "text": ("text", "line", "s", "phrase"),
    "char": ("c", "ch", "letter", "mark"),
    "flag": ("a", "b", "p", "q", "on", "ready"),
}
LOCAL_NAMES: dict[str, tuple[str, ...]] = {
    "acc": ("total", "acc", "result", "res", "r", "out", "s0", "best", "tmp"),
    "out": ("result", "out", "res", "r", "ans", "z", "made"),
    "i": ("i", "j", "idx", "pos"),
    "x": ("x0", "item", "e", "el", "cur", "val", "it"),
}
CONSTANT_WORDS: dict[int, str] = {
    2: "two",
    3: "three",
    4: "four",
    5: "five",
    6: "six",
    7: "seven",
    8: "eight",
    9: "nine",
}
