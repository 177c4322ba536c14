"""The turn loop, with completions written down beforehand and a real sandbox."""

import time

import pytest

from swerve.agents import NO_CALL, NUMBERED, CodeActAgent, Toolbox, Transcript
from swerve.rendering import render_calls
from swerve.sandboxes import ExecResult
from swerve.types import Completion, EpisodeStatus, FinishReason, SamplingParams

VIEW = ("str_replace_editor", {"command": "view", "path": "repair.py"})
EDIT = ("str_replace_editor", {"command": "str_replace", "path": "repair.py", "old_str": "+ 2", "new_str": "+ 1"})
RUN = ("execute_bash", {"command": "cat repair.py"})
FINISH = ("finish", {})
SAMPLING = SamplingParams(max_new_tokens=64)
SOURCE = "def f(x):\n    return x + 2"


class Script:
    """A session that says what it is told to, and remembers what it was given."""

    def __init__(self, renderer, completions):
        self.renderer, self.completions, self.given, self.closed = renderer, list(completions), [], False

    async def generate(self, new_tokens, sampling):
        assert sampling is SAMPLING
        assert not self.closed
        self.given.append(list(new_tokens))
        said = self.completions.pop(0)
        reason = FinishReason.STOP
        if isinstance(said, tuple):
            said, reason = said
        tokens = self.renderer.tokenizer.encode(said if isinstance(said, str) else render_calls(said))
        if reason is FinishReason.STOP:
            tokens.append(self.renderer.tokenizer.end_of_turn_id)
        logprobs = tuple(-0.25 * (i + 1) for i in range(len(tokens)))
        return Completion(
            tokens=tuple(tokens), logprobs=logprobs, finish_reason=reason, weights_version=len(self.given)
        )

    def close(self):
        self.closed = True


@pytest.fixture
def play(run, sandbox, renderer):
    run(sandbox.write_file("repair.py", SOURCE + "\n"))

    def play(*completions, max_turns=5, context_length=1024):
        session = Script(renderer, completions)
        toolbox = Toolbox(sandbox, command_timeout_s=5.0, max_observation_characters=400)
        transcript = Transcript()
        agent = CodeActAgent(renderer, SAMPLING, max_turns=max_turns)
        status = run(agent.run("Fix it.", session, toolbox, transcript, context_length=context_length))
        given = [token for tokens in session.given for token in tokens]
        tokens, sampled, logprobs, versions = transcript.arrays()
        assert tokens[~sampled].tolist() == given
        assert tokens.shape == sampled.shape == logprobs.shape == versions.shape
        assert ((versions == -1) == ~sampled).all()
        assert not logprobs[~sampled].any()
        assert (logprobs[sampled] < 0).all()
        return status, transcript, session

    return play


def test_an_episode_is_the_demonstration_of_itself(play, renderer):
    status, transcript, session = play([VIEW], [EDIT, RUN], [FINISH])
    assert status is EpisodeStatus.SUCCEEDED
    fixed = SOURCE.replace("+ 2", "+ 1")
    turns = [([VIEW], [SOURCE]), ([EDIT, RUN], ["edited", fixed]), ([FINISH], [])]
    tokens, sampled = renderer.demonstration("Fix it.", turns)
    assert transcript.tokens == tokens.tolist()
    assert transcript.sampled == sampled.tolist()
    assert [turn.tool_names for turn in transcript.turns] == [
        ("str_replace_editor",), ("str_replace_editor", "execute_bash"), ("finish",),
    ]  # fmt: skip
    assert [turn.observations for turn in transcript.turns] == [(SOURCE,), ("edited", fixed), ("finished",)]
    assert set(transcript.seconds) == {"generate", "tools"}
    assert session.given[0] == renderer.initial("Fix it.")
    assert sorted(set(transcript.weights_versions)) == [-1, 1, 2, 3]


def test_the_style_of_the_toolbox_decides_what_is_understood_and_said(run, sandbox, renderer):
    run(sandbox.write_file("repair.py", SOURCE + "\n"))
    look = ("execute_bash", {"command": "cat repair.py", "timeout": "3", "is_input": "false"})
    session = Script(renderer, [[look, EDIT], [FINISH]])
    toolbox = Toolbox(sandbox, command_timeout_s=5.0, max_observation_characters=400, style=NUMBERED)
    transcript = Transcript()
    agent = CodeActAgent(renderer, SAMPLING, max_turns=3)
    run(agent.run("Fix it.", session, toolbox, transcript, context_length=4096))
    assert transcript.turns[0].observations == (
        f"{SOURCE}\n[exit code 0]",
        "edited /testbed/repair.py; it now reads:\n     1\tdef f(x):\n     2\t    return x + 1",
    )


def test_the_turn_limit(play, run, sandbox):
    status, transcript, session = play([VIEW], [EDIT], max_turns=2)
    assert status is EpisodeStatus.MAX_TURNS
    assert "+ 1" in run(sandbox.read_file("repair.py"))  # the last turn counts
    assert transcript.sampled[-1]
    assert session.closed


def test_broken_calls_are_observations(play, renderer):
    broken = render_calls([("str_replace_editor", {"command": "fly"})])
    status, transcript, session = play(f"{render_calls([VIEW])}\n{broken}\n{render_calls([RUN])}", [FINISH])
    assert status is EpisodeStatus.SUCCEEDED
    turn = transcript.turns[0]
    assert turn.tool_names == ("str_replace_editor", "execute_bash")
    assert turn.num_malformed_calls == 1
    error = "error: parameter command of str_replace_editor must be one of view, create, str_replace, insert, undo_edit"
    assert turn.observations == (SOURCE, error, SOURCE)
    assert session.given[1] == renderer.tool_results(turn.observations)


def test_a_turn_without_a_call_is_told_and_counts(play):
    status, transcript, _ = play("I think it is fine.", "<think>" + render_calls([FINISH]), max_turns=2)
    assert status is EpisodeStatus.MAX_TURNS
    assert [turn.observations for turn in transcript.turns] == [(NO_CALL,), (NO_CALL,)]
    assert [turn.tool_names for turn in transcript.turns] == [(), ()]
    assert [turn.no_call for turn in transcript.turns] == [True, True]


def test_a_turn_that_tried_to_call_is_not_one_without_a_call(play):
    _, transcript, _ = play("<tool_call>\n<function=fly", [VIEW], [FINISH])
    assert [turn.no_call for turn in transcript.turns] == [False, False, False]
    assert [turn.num_malformed_calls for turn in transcript.turns] == [1, 0, 0]


def test_nothing_runs_after_finish(play, run, sandbox):
    status, transcript, _ = play([FINISH, EDIT])
    assert status is EpisodeStatus.SUCCEEDED
    assert "+ 2" in run(sandbox.read_file("repair.py"))
    assert transcript.turns[0].tool_names == ("finish",)


def test_repeated_failures_are_in_the_record(play):
    wrong = ("str_replace_editor", {**EDIT[1], "old_str": "absent"})
    _, transcript, _ = play([wrong], [wrong, wrong], [FINISH])
    assert [turn.num_repeated_failures for turn in transcript.turns] == [0, 2, 0]


def test_a_completion_cut_by_its_length_goes_on_with_an_end_we_write(play, renderer):
    whole = render_calls([VIEW, EDIT])
    cut = whole[: whole.index("<parameter=new_str>")]
    status, transcript, session = play((cut, FinishReason.LENGTH), [FINISH])
    assert status is EpisodeStatus.SUCCEEDED
    turn = transcript.turns[0]
    assert turn.tool_names == ("str_replace_editor",)  # what was complete has run, half an edit has not
    assert turn.num_malformed_calls == 1
    end = renderer.tokenizer.end_of_turn_id
    assert session.given[1] == [end, *renderer.tool_results(turn.observations)]
    first_end = transcript.tokens.index(end, len(session.given[0]))
    assert not transcript.sampled[first_end]


def test_a_completion_that_fills_the_context_ends_the_episode(play, run, sandbox):
    status, transcript, _ = play((render_calls([EDIT]), FinishReason.CONTEXT))
    assert status is EpisodeStatus.MAX_CONTEXT_LIMIT_REACHED
    assert "+ 2" in run(sandbox.read_file("repair.py"))
    assert transcript.sampled[-1]
    assert len(transcript.turns) == 1


def test_an_observation_that_does_not_fit_ends_the_episode(play, renderer):
    big = ("execute_bash", {"command": "seq 300"})
    status, transcript, session = play([big], context_length=150)
    assert status is EpisodeStatus.MAX_CONTEXT_LIMIT_REACHED
    assert len(session.given) == 1
    assert len(transcript.tokens) < 150
    status, transcript, _ = play(context_length=len(renderer.initial("Fix it.")))
    assert status is EpisodeStatus.MAX_CONTEXT_LIMIT_REACHED
    assert transcript.tokens == []


def test_an_abort_keeps_what_was_generated(play):
    status, transcript, _ = play([VIEW], ("<tool_call>\n<func", FinishReason.ABORT))
    assert status is EpisodeStatus.CANCELLED
    assert transcript.turns[-1].text == "<tool_call>\n<func"
    assert transcript.sampled[-1]


class Memory:
    """A sandbox that costs nothing, to see what the agent itself costs."""

    def __init__(self):
        self.text = SOURCE

    async def read_file(self, path):
        return self.text

    async def write_file(self, path, text, mode=0o644):
        self.text = text

    async def exec(self, command, timeout_s):
        return ExecResult(output="test_f ok\nall passed\n", exit_code=0)

    shell = exec

    async def call(self, entry, payload, timeout_s):
        raise NotImplementedError

    async def close(self):
        pass


def test_an_episode_costs_little_cpu_of_its_own(run, renderer):
    async def episodes(number):
        for _ in range(number):
            session = Script(renderer, [[VIEW], [EDIT, RUN], [FINISH]])
            toolbox = Toolbox(Memory(), command_timeout_s=5.0, max_observation_characters=400)
            agent = CodeActAgent(renderer, SAMPLING, max_turns=5)
            await agent.run("Fix it.", session, toolbox, Transcript(), context_length=1024)

    run(episodes(5))
    start = time.process_time()
    run(episodes(50))
    seconds = (time.process_time() - start) / 50
    assert seconds < 0.01  # about 1 ms on a quiet core
