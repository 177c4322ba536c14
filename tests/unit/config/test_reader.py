"""Recipes are read strictly, and every fault is one line that names file, key, value and remedy."""

import dataclasses
import math
import re

import pytest

from swerve.config import (
    RecipeError,
    TrainRecipe,
    check_recipe,
    parse_recipe,
    read_recipe,
    read_recipe_as,
    render,
    settings,
)
from swerve.config.schema import PretrainRecipe, Rollout
from swerve.types import SwerveError


@pytest.fixture
def write(tmp_path):
    def _write(text, name="r.toml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return _write


def problems(path, overrides=None):
    with pytest.raises(RecipeError) as caught:
        read_recipe(path, overrides)
    assert isinstance(caught.value, SwerveError)
    assert caught.value.exit_code == 2
    assert all("\n" not in line for line in caught.value.problems)
    return [line.replace(str(path.parent) + "/", "") for line in caught.value.problems]


def test_an_empty_recipe_is_all_defaults(write):
    assert read_recipe(write('kind = "train"')) == TrainRecipe()
    assert read_recipe(write('kind = "pretrain"')) == PretrainRecipe()


def test_the_loss_of_an_empty_recipe_is_the_benchmarks(write):
    recipe = read_recipe(write('kind = "train"'))
    assert isinstance(recipe, TrainRecipe)
    loss = recipe.algorithm
    assert (loss.advantage, loss.loss, loss.importance, loss.normaliser) == (
        "leave_one_out",
        "forced_on_policy",
        "sequence_mask",
        "token",
    )
    assert (loss.sequence_gate_low, loss.sequence_gate_high) == (0.999, 1.002)
    assert (loss.logprob_error_threshold, loss.overlong_filter) == (2.0, True)
    assert (loss.clip_low, loss.clip_high, loss.kl_coefficient) == (0.2, 0.28, 0.0)


def test_values_are_taken_and_integers_are_numbers(write):
    recipe = read_recipe(write('kind = "train"\n[rollout]\ntemperature = 2\n[training]\ntime_limit_s = inf\n'))
    assert isinstance(recipe, TrainRecipe)
    assert type(recipe.rollout.temperature) is float
    assert recipe.rollout.temperature == 2.0
    assert recipe.training.time_limit_s == math.inf


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("[rollout]\ntemprature = 1.0", "r.toml: rollout.temprature is unknown; did you mean rollout.temperature?"),
        ("[rolout]\ntemperature = 1.0", "r.toml: rolout is unknown; did you mean rollout?"),
        (
            "[training]\nlearning_rate = 1.0",
            "r.toml: training.learning_rate is unknown; did you mean optimizer.learning_rate?",
        ),
        ("[rollout]\nqqqqqq = 1", "r.toml: rollout.qqqqqq is unknown: remove it"),
        (
            '[rollout]\ntemperature = "hot"',
            'r.toml: rollout.temperature = "hot" must be a number above 0 (default 1.0)',
        ),
        ("[rollout]\ntemperature = true", "r.toml: rollout.temperature = true must be a number above 0"),
        ("[rollout]\ntemperature = nan", "r.toml: rollout.temperature = nan must be a number above 0"),
        ("[rollout]\nnum_slots = 4.0", "r.toml: rollout.num_slots = 4.0 must be an integer at least 1 (default 64)"),
        ("[rollout]\nnum_slots = 0", "r.toml: rollout.num_slots = 0 must be an integer at least 1 (default 64)"),
        ("[optimizer]\nbeta1 = 1.5", "r.toml: optimizer.beta1 = 1.5 must be a number at least 0 and at most 1"),
        ("[telemetry]\ndurable = 1", "r.toml: telemetry.durable = 1 must be true or false (default false)"),
        ("[run]\nname = 3", 'r.toml: run.name = 3 must be a text (default "")'),
        ('[tasks]\norder = "fixt"', 'r.toml: tasks.order = "fixt" must be one of fixed, shuffled; did you mean fixed?'),
        ("rollout = 3", "r.toml: rollout = 3 must be a table: write [rollout]"),
        ('[tasks]\nfamily = "files"', 'r.toml: tasks.train_file is missing: family = "files" needs it'),
        ('[tasks]\ntrain_file = "a"', 'r.toml: tasks.train_file = "a" has no effect with family = "functions"'),
        ("[rollout]\ntop_p = 0.9", "r.toml: rollout.top_p = 0.9 must be 1.0"),
        ("[sandbox]\ncpus = 2.0", 'r.toml: sandbox.cpus = 2.0 has no effect with backend = "bubblewrap": remove it'),
        (
            '[sandbox]\nbackend = "unsafe-local"\nnum_processes = 8',
            'r.toml: sandbox.num_processes = 8 has no effect with backend = "unsafe-local": remove it',
        ),
        (
            "[rollout]\nmax_new_tokens = 512",
            "r.toml: rollout.max_new_tokens = 512 leaves no room for a prompt in context_length = 512",
        ),
        (
            "[rollout]\ngenerations_per_prompt = 2",
            "r.toml: rollout.generations_per_prompt = 2 must be at least 3 with algorithm.advantage",
        ),
        (
            "[agent]\ntest_timeout_s = 60",
            "r.toml: sandbox.cpu_s = 20 would cut the 60 s that agent.command_timeout_s and agent.test_timeout_s",
        ),
        (
            '[agent]\ntemplate = "codeact"\nobservations = "plain"',
            'r.toml: agent.observations = "plain" must be "template" or "numbered" with template = "codeact"',
        ),
        (
            '[agent]\nobservations = "numbered"',
            'r.toml: agent.observations = "numbered" must be "template" or "plain" with template = "tiny_repair"',
        ),
        (
            '[agent]\ncommand = "run {task}"',
            'r.toml: agent.command = "run {task}" has the unknown placeholder {task}: there are {task_file}, ',
        ),
        (
            '[agent]\ncommand = "run {"',
            'r.toml: agent.command = "run {" cannot be split into words and placeholders: ',
        ),
        (
            '[agent]\ncommand = "run \'it"',
            'r.toml: agent.command = "run \'it" cannot be split into words and placeholders: No closing quotation',
        ),
        (
            '[agent]\ncommand = " "',
            'r.toml: agent.command = " " names no program: remove it, or name one',
        ),
        (
            '[agent]\ncommand = "run {task_file}"\nmax_observation_characters = 9',
            "r.toml: agent.max_observation_characters = 9 has no effect with an outside agent",
        ),
        ("[evaluation]\ntemperature = 0\ntop_p = 0.9", "r.toml: evaluation.top_p = 0.9 has no effect with temperature"),
    ],
)
def test_each_fault_is_one_line_with_key_value_and_remedy(write, body, line):
    found = problems(write(f'kind = "train"\n{body}\n'))
    assert found[0].startswith(line), found


@pytest.mark.parametrize(
    ("body", "keys"),
    [
        ('importance = "token"\nloss = "clip"', ["importance"]),
        ('importance = "token"\nloss = "gspo"\nnormaliser = "sequence"', ["importance"]),
        ('loss = "gspo"\nimportance = "none"', ["normaliser"]),
        ('loss = "gspo"\nnormaliser = "sequence"', ["clip_low", "clip_high"]),
        ('loss = "gspo"\nnormaliser = "sequence"\nclip_low = 3e-4\nclip_high = 4e-4', []),
        ('loss = "gspo"\nnormaliser = "sequence"\nimportance = "none"', []),
        ('loss = "clip"\ndual_clip = 4.0', ["dual_clip"]),
        ('loss = "dual_clip"\ndual_clip = 4.0\nclip_high = 0.3', []),
        ("clip_low = 0.1", ["clip_low"]),
        ('loss = "no_clip"\nclip_high = 0.3', ["clip_high"]),
        ("importance_cap = 3.0", ["importance_cap"]),
        ('importance = "token"\nimportance_cap = 3.0', []),
        ('importance = "none"\nsequence_gate_low = 0.9', ["sequence_gate_low"]),
        ('kl_estimator = "k1"', ["kl_estimator"]),
        ('kl_estimator = "k1"\nkl_coefficient = 0.1', []),
    ],
)
def test_no_setting_of_the_loss_is_without_effect(write, body, keys):
    """What the loss chosen does not read, or would apply twice, is refused rather than ignored."""
    path = write(f'kind = "train"\n[algorithm]\n{body}\n')
    if not keys:
        read_recipe(path)
        return
    assert [line.split()[1].removeprefix("algorithm.") for line in problems(path)] == keys


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ('[optimizer]\nkind = "adamw"\nmomentum = 0.9', "optimizer.momentum"),
        ('[data]\nfamilies = ["mini"]', "data.task_share"),
        ("[continuation]\ngive_up = 0.5", "continuation.give_up"),
    ],
)
def test_no_setting_of_pretraining_is_without_effect(write, body, key):
    assert problems(write(f'kind = "pretrain"\n{body}\n'))[0].startswith(f"r.toml: {key} ")


VLLM = '[engine]\nkind = "vllm"\nweights_directory = "w"\nurls = ["http://a:1"]\n'


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ('urls = ["http://b:80"]', 'engine.urls = ["http://b:80"] has no effect with kind = "embedded": remove it'),
        ('refit = "restart"', 'engine.refit = "restart" has no effect with kind = "embedded": remove it'),
        ('kind = "vllm"\nurls = ["http://b:80"]', "engine.weights_directory is missing"),
        ('kind = "vllm"\nweights_directory = "w"', "engine.urls is missing"),
        ('kind = "vllm"\nweights_directory = "w"\nurls = ["b:80"]', 'has "b:80": write each as "http://host:port"'),
        ('kind = "vllm"\nweights_directory = "w"\nurls = ["http://b"]', 'has "http://b": write each as'),
        ('kind = "vllm"\nweights_directory = "w"\nurls = ["http://b:80/v1"]', "write each as"),
        ('kind = "vllm"\nweights_directory = "w"\nurls = ["http://b:8x"]', "write each as"),
        (
            'kind = "vllm"\nweights_directory = "w"\nurls = ["http://b:1", "http://b:1"]',
            'engine.urls = ["http://b:1", "http://b:1"] names a server twice: remove one',
        ),
    ],
)
def test_an_engine_is_named_whole_or_not_at_all(write, body, line):
    assert line in "\n".join(problems(write(f'kind = "train"\n[engine]\n{body}\n')))


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ('refit = "restart"', "engine.command is missing"),
        ('command = "serve {weights}"', "lacks {port}: a server is told it"),
        ('command = "serve {model} {weights} {port}"', "has the unknown placeholder {model}"),
        ('command = "serve {weights} {port}"', None),
        ("request_timeout_s = 5", None),
    ],
)
def test_servers_are_started_as_the_recipe_can(write, body, line):
    path = write(f'kind = "train"\n{VLLM}{body}\n')
    if line:
        assert line in "\n".join(problems(path))
    else:
        assert isinstance(read_recipe(path), TrainRecipe)


@pytest.mark.parametrize(
    "value", ["[]", "[[1, 1]]", "[[0, 0]]", "[[0]]", "[[0, 1, 2]]", "[[0, 1], [0, 2]]", "[1, 2]", "3"]
)
def test_lists_within_lists_are_checked(write, value):
    found = problems(write(f'kind = "pretrain"\n[training]\nmicro_batches = {value}\n'))
    assert found[0].startswith("r.toml: training.micro_batches ")
    assert "must be" in found[0]


def test_lists_come_from_the_command_line_too(write):
    recipe = read_recipe(
        write('kind = "pretrain"'),
        {"training.micro_batches": "[[0, 3]]", "data.families": '["mini"]', "data.task_share": "0"},
    )
    assert isinstance(recipe, PretrainRecipe)
    assert recipe.training.micro_batches == ((0, 3),)
    assert recipe.data.families == ("mini",)


def test_all_faults_are_reported_at_once(write):
    found = problems(write('kind = "train"\n[rollout]\nnum_slots = 0\nretries = -1\n[run]\nsed = 1\n'))
    assert len(found) == 3


def test_the_kind_chooses_the_schema(write):
    assert problems(write("")) == ['r.toml: kind is missing: write kind = "train" or "pretrain" or "ab"']
    assert problems(write('kind = "tarin"')) == [
        'r.toml: kind = "tarin" is unknown: write kind = "train" or "pretrain" or "ab"'
    ]
    with pytest.raises(RecipeError, match='this command needs kind = "pretrain"'):
        read_recipe_as(PretrainRecipe, write('kind = "train"'))


def test_files_that_cannot_be_read_are_named(write, tmp_path):
    assert problems(write("kind ="))[0].startswith("r.toml: not TOML: invalid value")
    assert problems(tmp_path / "nothing_alike.toml") == ["nothing_alike.toml: no such recipe"]
    assert problems(tmp_path / "rr.toml") == ["rr.toml: no such recipe; did you mean r.toml?"]
    (tmp_path / "b.toml").write_bytes(b"\xff")
    assert problems(tmp_path / "b.toml") == ["b.toml: cannot be read: not UTF-8 text"]
    (tmp_path / "d.toml").mkdir()
    assert problems(tmp_path / "d.toml") == ["d.toml: cannot be read: Is a directory"]


def test_the_command_line_comes_last(write):
    path = write('kind = "train"\n[rollout]\nnum_slots = 8\n')
    recipe = read_recipe(path, {"rollout.num_slots": "4", "run.name": "x", "optimizer.learning_rate": ".5"})
    assert isinstance(recipe, TrainRecipe)
    assert (recipe.rollout.num_slots, recipe.run.name, recipe.optimizer.learning_rate) == (4, "x", 0.5)
    assert recipe.training.num_steps == TrainRecipe().training.num_steps


@pytest.mark.parametrize(
    ("key", "text", "line"),
    [
        ("rollout.num_slots", "many", 'command line: --rollout.num_slots = "many" must be an integer at least 1'),
        ("rollout.num_slot", "1", "command line: --rollout.num_slot is unknown; did you mean rollout.num_slots?"),
        ("rollout.top_p", "0.5", "command line: --rollout.top_p = 0.5 must be 1.0"),
        ("telemetry.durable", "yes", 'command line: --telemetry.durable = "yes" must be true or false'),
        ("rollout", "1", "command line: --rollout is unknown"),
    ],
)
def test_faults_on_the_command_line_say_so(write, key, text, line):
    assert problems(write('kind = "train"'), {key: text})[0].startswith(line)


def test_texts_on_the_command_line_need_no_quotes(write):
    recipe = read_recipe(write('kind = "train"'), {"run.name": "3", "tasks.order": "shuffled"})
    assert isinstance(recipe, TrainRecipe)
    assert (recipe.run.name, recipe.tasks.order) == ("3", "shuffled")


def test_a_recipe_extends_another(write):
    write('kind = "train"\n[rollout]\nnum_slots = 8\nretries = 1\n', "base.toml")
    path = write('extends = "base.toml"\n[rollout]\nretries = 3\n')
    recipe = read_recipe(path)
    assert isinstance(recipe, TrainRecipe)
    assert (recipe.rollout.num_slots, recipe.rollout.retries) == (8, 3)


def test_a_fault_names_the_file_it_stands_in(write):
    write('kind = "train"\n[rollout]\nnum_slots = 0\n', "base.toml")
    assert problems(write('extends = "base.toml"'))[0].startswith("base.toml: rollout.num_slots = 0")


def test_a_recipe_does_not_extend_itself(write):
    write('extends = "r.toml"', "base.toml")
    assert "extends itself" in problems(write('extends = "base.toml"'))[0]
    assert "no such recipe (r.toml extends it)" in problems(write('extends = "none.toml"'))[0].replace(
        str(write("").parent) + "/", ""
    )
    assert "must be a text" in problems(write("extends = 3"))[0]


def test_recipes_built_in_python_are_checked_too():
    check_recipe(TrainRecipe())
    with pytest.raises(RecipeError, match=r"recipe: rollout.num_slots = 0 must be an integer at least 1"):
        check_recipe(TrainRecipe(rollout=Rollout(num_slots=0)))
    with pytest.raises(RecipeError, match="must be an integer"):
        check_recipe(dataclasses.replace(TrainRecipe(), rollout=Rollout(num_slots="4")))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("text", "value"), [("dropless", "dropless"), ("1.25", 1.25), ("2", 2.0)])
def test_a_setting_may_be_a_number_or_a_word(tmp_path, text, value):
    (tmp_path / "r.toml").write_text('kind = "train"\n')
    recipe = read_recipe_as(TrainRecipe, tmp_path / "r.toml", {"execution.buffer_factor": text})
    assert recipe.execution.buffer_factor == value
    assert parse_recipe(render(recipe)) == recipe


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("[mesh]\nfsdp = 3", "packing.rows_per_micro_batch = 8 must be a multiple of mesh.fsdp x mesh.expert = 3"),
        ("[mesh]\ncontext = 3", "packing.row_length = 512 must be a multiple of mesh.context = 3"),
        ('[execution]\ncontext_attention = "ring"', 'context_attention = "ring" has no effect with mesh.context = 1'),
        (
            '[execution]\nexperts = "grouped"\nexpert_block = 8',
            'expert_block = 8 has no effect with experts = "grouped"',
        ),
    ],
)
def test_a_mesh_divides_the_work_and_its_settings_are_read(settings, message):
    with pytest.raises(RecipeError, match=re.escape(message)):
        parse_recipe(f'kind = "train"\n{settings}\n')


def test_text_reads_like_a_file():
    assert parse_recipe('kind = "train"') == TrainRecipe()
    with pytest.raises(RecipeError, match="<text>: kind is missing"):
        parse_recipe("")


@pytest.mark.parametrize("schema", [TrainRecipe, PretrainRecipe])
def test_every_setting_has_help_and_a_lawful_default(schema):
    for setting in settings(schema):
        assert len(setting.help) > 10 or setting.key == "kind", setting.key
        if setting.range is not None and setting.default != "dropless":
            assert isinstance(setting.default, int | float)
            assert setting.range.allows(setting.default), setting.key
    check_recipe(schema())
