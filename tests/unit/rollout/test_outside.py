"""Outside agents: real programs, real HTTP, real sandboxes; only the policy's words are written down beforehand."""

import asyncio
import json
import os
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from swerve.agents.outside import OutsideAgents
from swerve.rendering import Template
from swerve.rollout import rollout_metrics, run_episode
from swerve.types import Completion, EpisodeStatus, FinishReason, Limits, MachineError

LIBRARY = Path(__file__).parent
FIX = "sed -i 's/+ 2/+ 1/' repair.py && ./run_tests"
LIMITS = Limits(max_turns=4, episode_timeout_s=30.0, command_timeout_s=5.0)


@pytest.fixture
def play(run, world, words, tmp_path, renderer):
    """Plays an episode with a program against a script of answers."""

    def play(program, script, *, limits=LIMITS, template="tiny_repair", context_length=1024, delay_s=0.0, command=""):
        file = tmp_path / "agent.py"
        file.write_text(f"import sys\nsys.path.insert(0, {str(LIBRARY)!r})\n" + textwrap.dedent(program))
        here = world(lambda session_id, number: script, delay_s=delay_s)
        here.policy.context_length = context_length

        async def episode():
            line = command or f"{sys.executable} -I {file} {{task_file}}"
            tokenizer = renderer.tokenizer
            async with OutsideAgents(line, tokenizer, Template.load(template)) as outside:
                return await run_episode(
                    words.task(limits=limits),
                    0,
                    roles=replace(here.roles, outside=outside),
                    settings=here.settings,
                    seed=3,
                )

        trajectory = run(episode())
        assert not here.policy.open_now, "the session is closed"
        return trajectory, here

    return play


REPAIR = """
    from outside_library import *
    messages = list(START)
    box = start("--name", "box", "-w", TASK["workdir"])
    while "DONE" not in (said := say(messages)):
        messages.append(user(bash(box, said).stdout))
    assert docker("stop", "box").returncode == 0
"""


def test_a_program_repairs_and_every_token_is_recorded(play, words, renderer):
    trajectory, here = play(REPAIR, ["cat repair.py", FIX, "DONE"])
    assert (trajectory.status, trajectory.reward, trajectory.error) == (EpisodeStatus.SUCCEEDED, 1.0, "")
    seen = ["cat repair.py", words.BROKEN, FIX, "test_inc ok\nall passed\n", "DONE"]
    encode, content = renderer.tokenizer.encode, renderer.tokenizer.encode_content
    end = renderer.tokenizer.end_of_turn_id
    tokens = renderer.opening([("system", "You repair."), ("user", words.task().problem_statement)])
    sampled = [False] * len(tokens)
    for said, answered in zip(seen[::2], [*seen[1::2], None], strict=True):
        tokens += [*encode(said), end]
        sampled += [True] * (len(encode(said)) + 1)
        if answered is not None:
            new = renderer.continuation([("user", answered)])
            tokens += new
            sampled += [False] * len(new)
    assert content(words.BROKEN)[0] in tokens
    assert trajectory.tokens.tolist() == tokens
    assert trajectory.sampled.tolist() == sampled
    lengths = [len(encode(said)) + 1 for said in seen[::2]]
    logprobs = [-1.0 / (3 + i) for length in lengths for i in range(length)]
    assert np.allclose(trajectory.behaviour_logprobs[trajectory.sampled], logprobs, rtol=1e-7)
    assert set(trajectory.weights_versions[trajectory.sampled].tolist()) == {7}
    assert [turn.text for turn in trajectory.turns] == seen[::2]
    assert [turn.observations for turn in trajectory.turns] == [(seen[1],), (seen[3],), ()]
    assert trajectory.requests.num_answered == 3
    assert set(trajectory.seconds) == {"start", "generate", "tools", "agent", "grade"}
    assert here.policy.opened == [("inc#0000", 3)]


def test_tools_are_shown_called_and_answered(play, words, renderer):
    script = [[("bash", {"command": "cat repair.py"}), ("bash", {"command": FIX})], "no call", "DONE"]
    program = """
        from outside_library import *
        messages = list(START)
        box = start()
        answer = chat(messages, tools=[BASH])["choices"][0]
        assert answer["finish_reason"] == "tool_calls"
        message = answer["message"]
        assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]][0] == {
            "command": "cat repair.py"
        }
        messages.append({**message, "content": None})  # as some clients give it back
        for call in message["tool_calls"]:
            output = bash(box, json.loads(call["function"]["arguments"])["command"]).stdout
            messages.append({"role": "tool", "content": output, "tool_call_id": call["id"]})
        second = chat(messages, tools=[BASH])["choices"][0]
        assert (second["finish_reason"], second["message"]) == ("stop", {"role": "assistant", "content": "no call"})
        messages += [second["message"], user("Go on.")]
        say(messages, tools=[BASH])
    """
    trajectory, _ = play(program, script, template="codeact", context_length=4096)
    assert (trajectory.status, trajectory.reward) == (EpisodeStatus.SUCCEEDED, 1.0), trajectory.error
    assert [turn.tool_names for turn in trajectory.turns] == [("bash", "bash"), (), ()]
    assert [turn.no_call for turn in trajectory.turns] == [False, True, True]
    text = renderer.tokenizer.decode(trajectory.tokens.tolist())
    assert '<tools>\n{"type": "function", "function": {"name": "bash", "description": "Run a command."' in text
    assert "\n</tool_response>\n<tool_response>\ntest_inc ok" in text


def test_tools_that_the_template_hides_are_refused(play):
    program = "from outside_library import *\nchat(START, tools=[BASH])"
    trajectory, _ = play(program, ["DONE"])
    assert (trajectory.status, trajectory.reward) == (EpisodeStatus.ERROR, None)
    assert "the template tiny_repair does not tell the policy of tools" in trajectory.error


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("messages[1] = user('Something else.')", "message 1 (user, 'Something else.'), it was message 1 (user, 'Fix"),
        ("messages[2] = {'role': 'assistant', 'content': 'I said that.'}", "message 2 (assistant, 'I said that.')"),
        ("del messages[2:]; messages += [user('a'), user('b'), {'role': 'assistant', 'content': 'b'}]", "not give"),
        ("messages.append({'role': 'assistant', 'content': 'I will:'})", "an answer that the policy did not give"),
        ("messages = messages[1:]", "message 0 (user"),
    ],
)
def test_a_rewritten_history_ends_the_episode_and_names_the_message(play, change, complaint):
    program = f"""
        from outside_library import *
        messages = list(START)
        say(messages)
        messages.append(user("Go on."))
        {change}
        status, text = request("/chat/completions", {{"model": "swerve", "messages": messages}})
        time.sleep(60)  # it is ended meanwhile
    """.replace("import *", "import *\n        import time")
    trajectory, here = play(program, ["first", "second"])
    assert (trajectory.status, trajectory.reward) == (EpisodeStatus.ERROR, None)
    assert complaint in trajectory.error
    assert (trajectory.requests.num_refused, trajectory.requests.num_rewritten) == (1, 1)
    assert here.environment.num_graded == 0
    assert len(trajectory.turns) == 1
    assert rollout_metrics([trajectory])["outside/rewritten"] == 1


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"temperature": 0.0}, "temperature = 0.0: the recipe samples with 1; the agent must not set temperature"),
        ({"n": 2}, "n = 2"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"stop": ["\n"]}, "stop"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_tokens": 3}, "rollout.max_new_tokens"),
        ({"best_guess": 1}, "best_guess: an unknown setting"),
        ({"model": "gpt"}, "model 'gpt': the only one is 'swerve'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "message 0: its content must be text"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "message 0: a message has a role"),
        ({"messages": []}, "messages must be a list"),
        ({"tools": [{"type": "web"}]}, "tools: a tool is an object of type function"),
    ],
)
def test_what_a_request_cannot_have_is_refused_by_name(play, settings, complaint):
    trajectory, _ = play(f"from outside_library import *\nchat(**{{'messages': START, **{settings!r}}})", ["first"])
    assert trajectory.status is EpisodeStatus.ERROR
    assert complaint in trajectory.error
    assert not trajectory.sampled.any()


def test_what_changes_nothing_is_ignored_counted_and_told(play):
    program = """
        from outside_library import *
        chat(START, temperature=1.0, top_p=1, n=1, stop=None, seed=5, user="me", max_tokens=100_000)
    """
    trajectory, _ = play(program, ["DONE"])
    assert trajectory.status is EpisodeStatus.SUCCEEDED
    assert trajectory.requests.num_ignored_settings == 3
    assert rollout_metrics([trajectory])["outside/ignored_settings"] == 3


def test_an_answer_asked_for_twice_is_sampled_once(play):
    program = """
        from concurrent.futures import ThreadPoolExecutor
        from outside_library import *
        with ThreadPoolExecutor(3) as threads:
            answers = list(threads.map(lambda _: chat(START)["choices"][0]["message"]["content"], range(3)))
        assert answers == ["first"] * 3
        messages = [*START, {"role": "assistant", "content": "first"}, user("And?")]
        assert say(messages) == "second"
    """
    trajectory, _ = play(program, ["first", "second"], delay_s=0.2)
    assert trajectory.status is EpisodeStatus.SUCCEEDED, trajectory.error
    assert (trajectory.requests.num_answered, trajectory.requests.num_repeated) == (2, 2)


def test_an_agent_that_asks_the_same_for_ever_is_told(play):
    trajectory, _ = play("from outside_library import *\nwhile True: chat(START)", ["DONE"])
    assert trajectory.status is EpisodeStatus.ERROR
    assert trajectory.error == "the same request came 10 times again: an answer is sampled once"


def test_an_answer_that_the_agent_drops_stays_in_the_record(play, renderer):
    program = """
        from outside_library import *
        say(START + [])
        messages = [*START, user("That was no command.")]
        say(messages)
        messages.append(user("Good."))
        say(messages)
    """
    trajectory, _ = play(program, ["chatter", "ls", "DONE"])
    assert trajectory.status is EpisodeStatus.SUCCEEDED, trajectory.error
    assert trajectory.requests.num_dropped_answers == 1
    text = renderer.tokenizer.decode(trajectory.tokens.tolist())
    assert text.index("chatter") < text.index("That was no command.") < text.index("Good.")


def test_a_stream_is_read_as_chunks(play):
    program = """
        from outside_library import *
        body = {"model": "swerve", "messages": START, "stream": True, "stream_options": {"include_usage": True}}
        status, text = request("/chat/completions", body)
        events = [line.removeprefix("data: ") for line in text.splitlines() if line]
        assert events.pop() == "[DONE]"
        chunks = [json.loads(event) for event in events]
        assert [chunk["object"] for chunk in chunks] == ["chat.completion.chunk"] * 3
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "first"}
        assert chunks[1]["choices"][0]["finish_reason"] == "stop"
        usage = chunks[2]["usage"]
        print(json.dumps(usage), file=sys.stderr)
        sys.exit(9)
    """.replace("import *", "import *\n        import sys")
    trajectory, _ = play(program, ["first"])
    assert trajectory.status is EpisodeStatus.ERROR
    usage = json.loads(trajectory.error.partition("exit code 9: ")[2])
    num_sampled = trajectory.num_sampled_tokens
    num_given = trajectory.tokens.size - num_sampled
    assert usage == {
        "prompt_tokens": num_given, "completion_tokens": num_sampled, "total_tokens": trajectory.tokens.size,
    }  # fmt: skip


def test_only_the_key_of_a_running_episode_opens_anything(play):
    program = """
        from outside_library import *
        for key in ("x", "", os.environ["OPENAI_API_KEY"][:-1], os.environ["OPENAI_API_KEY"] + "x", "é"):
            assert request("/models", key=key or " ")[0] == 401, key
        status, text = request("/models")
        assert [model["id"] for model in json.loads(text)["data"]] == ["swerve"]
        say(START + [])
    """
    trajectory, _ = play(program.replace('"é"', '"_"'), ["DONE"])
    assert trajectory.status is EpisodeStatus.SUCCEEDED, trajectory.error


def test_the_program_is_told_what_it_may_know_and_nothing_else(play, words):
    os.environ["SWERVE_TEST_SECRET"] = "leak"
    program = """
        from outside_library import *
        assert set(TASK) == {"id", "problem_statement", "image", "workdir", "model", "max_turns", "command_timeout_s",
                             "episode_timeout_s"}, TASK
        assert set(os.environ) - {"LC_CTYPE", "PWD", "SHLVL", "_"} == {
            "PATH", "HOME", "TMPDIR", "LANG", "OPENAI_BASE_URL", "OPENAI_API_KEY", "SWERVE_TASK_FILE", "SWERVE_DOCKER"
        }, set(os.environ)
        assert Path(os.environ["SWERVE_DOCKER"]).stat().st_mode & 0o077 == 0
        assert "test_hidden" not in bash(start(), "env; ls -R /testbed").stdout
        say(START + [])
    """
    try:
        trajectory, _ = play(program, ["DONE"])
    finally:
        del os.environ["SWERVE_TEST_SECRET"]
    assert trajectory.status is EpisodeStatus.SUCCEEDED, trajectory.error


def test_the_turn_limit_ends_the_episode_and_grades_what_is_left(play):
    trajectory, _ = play(REPAIR, [FIX, "ls", "ls"], limits=replace(LIMITS, max_turns=2))
    assert (trajectory.status, trajectory.reward) == (EpisodeStatus.MAX_TURNS, 1.0)
    assert len(trajectory.turns) == 2


def test_a_full_context_is_a_length_and_then_the_end(play):
    program = """
        from outside_library import *
        messages = list(START)
        box = start()
        assert bash(box, say(messages)).returncode == 0
        messages.append(user("long " * 2000))
        answer = chat(messages)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 0
        while True:  # an agent that does not understand
            request("/chat/completions", {"model": "swerve", "messages": [*messages, answer, user("x")]})
    """.replace(", answer, user", ', {"role": "assistant", "content": ""}, user')
    trajectory, _ = play(program, [FIX])
    assert (trajectory.status, trajectory.reward) == (EpisodeStatus.MAX_CONTEXT_LIMIT_REACHED, 1.0)
    assert trajectory.tokens.size < 1024
    assert len(trajectory.turns) == 1


def test_a_completion_cut_by_its_length_goes_on_with_an_end_we_write(run, renderer, words):
    from swerve.agents import Transcript
    from swerve.agents.outside.chat import read_chat
    from swerve.agents.outside.recorder import Recorder
    from swerve.types import SamplingParams

    class Session:
        def __init__(self):
            self.given = []

        async def generate(self, new_tokens, sampling):
            self.given.append(list(new_tokens))
            return Completion(tokens=(65,), logprobs=(-1.0,), finish_reason=FinishReason.LENGTH, weights_version=1)

        def close(self):
            pass

    async def talk():
        session, sampling = Session(), SamplingParams()
        recorder = Recorder(
            session, lambda tools: renderer, Transcript(), sampling=sampling, max_turns=9, context_length=99
        )
        messages = [{"role": "user", "content": "a"}]
        answer = await recorder.answer(read_chat({"model": "swerve", "messages": messages}, sampling))
        assert answer.finish_reason == "length"
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "b"}]
        await recorder.answer(read_chat({"model": "swerve", "messages": messages}, sampling))
        await recorder.close()
        return session.given[1]

    assert run(talk()) == [renderer.tokenizer.end_of_turn_id, *renderer.continuation([("user", "b")])]


# ----------------------------------------------------------------------------------------------------- the program


@pytest.mark.parametrize(
    ("program", "complaint"),
    [
        ("raise ValueError('no\\nmodel')", "ended with exit code 1: model"),
        ("import sys; print('bye', file=sys.stderr)", "ended without asking the policy anything: bye"),
        ("import os; os.kill(os.getpid(), 9)", "ended with exit code 137"),
    ],
)
def test_a_program_that_fails_is_an_error_with_its_last_words(play, program, complaint):
    trajectory, _ = play(program, ["DONE"])
    assert (trajectory.status, trajectory.reward) == (EpisodeStatus.ERROR, None)
    assert complaint in trajectory.error


def test_a_program_that_does_not_exist_is_an_error(play):
    trajectory, _ = play("", ["DONE"], command="no-such-agent --task {task_file}")
    assert trajectory.status is EpisodeStatus.ERROR
    assert trajectory.error.endswith("no-such-agent: No such file or directory")


def test_an_episode_that_ends_leaves_nothing_of_the_program(play, tmp_path):
    """Children, grandchildren that left their session, and those whose parents have ended: all are gone."""
    program = f"""
        import subprocess, sys, time
        from outside_library import *
        sleep = "import os, time; open({str(tmp_path)!r} + f'/pid{{os.getpid()}}', 'w').close(); time.sleep(99)"
        subprocess.Popen([sys.executable, "-c", sleep], start_new_session=True)
        subprocess.run(["sh", "-c", 'setsid "$0" -c "$1" & :', sys.executable, sleep])
        while len(list(Path({str(tmp_path)!r}).glob("pid*"))) < 2:
            time.sleep(0.01)
        say(START + [])
    """
    for ending, status in (
        ("", EpisodeStatus.SUCCEEDED),
        ("\n        time.sleep(99)", EpisodeStatus.AGENT_TIMEOUT),
    ):
        limits = replace(LIMITS, episode_timeout_s=2.0 if ending else 30.0)
        start = time.perf_counter()
        trajectory, _ = play(program + ending, ["DONE"], limits=limits)
        assert trajectory.status is status, trajectory.error
        assert time.perf_counter() - start < 20
        files = list(tmp_path.glob("pid*"))
        assert len(files) == 2
        for file in files:
            assert not Path("/proc", file.name.removeprefix("pid")).exists()
            file.unlink()


def test_a_policy_that_fails_ends_the_episode_with_its_cause(play):
    trajectory, _ = play("from outside_library import *\nchat(START)", [MachineError("the engine is gone")])
    assert (trajectory.status, trajectory.error) == (EpisodeStatus.ERROR, "the engine is gone")
    with pytest.raises(ZeroDivisionError):
        play("from outside_library import *\nchat(START)", [ZeroDivisionError("a bug")])


def test_an_engine_that_stops_cancels_the_episode(play):
    trajectory, _ = play("from outside_library import *\nchat(START)", [("half a ", FinishReason.ABORT)])
    assert (trajectory.status, trajectory.error) == (EpisodeStatus.CANCELLED, "the policy stopped generating")
    assert trajectory.turns[0].text == "half a "


# ------------------------------------------------------------------------------------------------------ the sandbox


def test_the_docker_that_agents_find(play):
    program = """
        from outside_library import *
        assert docker("exec", "box", "ls").returncode == 1  # not run yet
        assert docker("run", "-d", "ubuntu", "sleep", "1").stderr.strip() == (
            "docker: image ubuntu: this episode's is inc"
        )
        box = start("--rm", "--name", "box", "-w", "/tmp", "-e", "A=1 2")
        assert len(box) == 64
        assert docker("exec", box, "pwd").stdout == "/tmp\\n"
        assert docker("exec", box[:12], "bash", "-lc", "echo $A").stdout == "1 2\\n"
        done = docker("exec", "-w", "/testbed", "-e", "A=3", "box", "sh", "-c", "echo $A; pwd; echo no >&2; exit 7")
        assert (done.stdout, done.returncode) == ("3\\n/testbed\\nno\\n", 7)
        assert docker("exec", "-i", "box", "cat", input="a\\nb").stdout == "a\\nb"
        assert docker("exec", "box", "cat").stdout == ""
        assert docker("version").returncode == 0
        for words, said in (
            (("exec", "--privileged", "box", "ls"), "exec: unknown flag: --privileged"),
            (("exec", "-it", "box", "ls"), "write the flags of -it one by one"),
            (("run", "-d", "-v", "/:/host", "inc", "sleep", "1"), "run: unknown flag: -v"),
            (("run", "inc", "sleep", "1"), "run: only with -d"),
            (("run", "-d", "inc", "bash"), "only `sleep TIME` can be run"),
            (("run", "-d", "inc", "sleep", "1"), "an episode has one container"),
            (("cp", "box:/x", "."), "cp: there are run, exec, stop, rm and version"),
            (("exec", "-e", "A", "box", "ls"), "-e A: needs KEY=VALUE"),
            (("exec", "other", "ls"), "No such container: other"),
        ):
            done = docker(*words)
            assert done.returncode and said in done.stderr, (words, done)
        assert docker("rm", "-f", "box").stdout == "box\\n"
        assert "No such container" in docker("exec", "box", "ls").stderr
        say(START + [])
    """
    trajectory, _ = play(program, ["DONE"])
    assert trajectory.status is EpisodeStatus.SUCCEEDED, trajectory.error


def test_a_command_that_takes_too_long_is_killed_with_all_it_started(play):
    program = """
        import subprocess, time
        from outside_library import *
        box = start()
        done = bash(box, "echo begun; (sleep 50; touch /tmp/late) & sleep 50")
        assert (done.stdout, done.returncode) == ("begun\\n", 124), done
        assert "killed after 1 s" in done.stderr
        try:
            docker("exec", box, "bash", "-c", "sleep 0.6; touch /tmp/late", timeout=0.2)  # the agent's own limit
        except subprocess.TimeoutExpired:
            pass
        time.sleep(0.8)
        assert bash(box, "ls /tmp/late").returncode == 2
        say(START + [])
    """
    trajectory, _ = play(program, ["DONE"], limits=replace(LIMITS, command_timeout_s=1.0))
    assert trajectory.status is EpisodeStatus.SUCCEEDED, trajectory.error


def test_a_sandbox_that_dies_is_never_a_reward(run, world, words, tmp_path, renderer):
    file = tmp_path / "agent.py"
    file.write_text(
        f"import sys\nsys.path.insert(0, {str(LIBRARY)!r})\nfrom outside_library import *\n"
        f"box = start()\nopen({str(tmp_path / 'up')!r}, 'w').close()\nwhile True: bash(box, 'sleep 0.1')\n"
    )
    here = world(lambda session_id, number: ["DONE"])
    started = []

    class Pool:
        async def start(self, image_name, prepare=None):
            started.append(await here.roles.pool.start(image_name, prepare))
            return started[-1]

    async def play():
        line = f"{sys.executable} {file}"
        async with OutsideAgents(line, renderer.tokenizer, Template.load("tiny_repair")) as outside:
            roles = replace(here.roles, pool=Pool(), outside=outside)
            episode = asyncio.create_task(run_episode(words.task(), 0, roles=roles, settings=here.settings, seed=0))
            while not (tmp_path / "up").exists():
                await asyncio.sleep(0.01)
            await started[0].close()
            return await episode

    trajectory = run(play())
    assert (trajectory.status, trajectory.reward) == (EpisodeStatus.ERROR, None)
    assert "gone" in trajectory.error
