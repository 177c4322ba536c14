"""An outside agent in one readable piece: any program that speaks the OpenAI protocol can play Swerve's episodes.

    swerve rollout first --recipe recipes/mini.toml --agent.command "python3 examples/outside_agent.py"

It knows nothing of Swerve but four variables: where the policy answers, the key, the task, and a `docker` that leads
into the episode's sandbox. The tools are those that the shipped policy knows, so it plays as the built-in agent does.
"""

import json
import os
import re
import subprocess
import urllib.request
from pathlib import Path

DOCKER = os.environ["SWERVE_DOCKER"]
TASK = json.loads(Path(os.environ["SWERVE_TASK_FILE"]).read_text())
CALL = re.compile(r"<tool_call>\n<function=(\w+)>\n(.*?)</function>\n</tool_call>", re.DOTALL)
PARAMETER = re.compile(r"<parameter=(\w+)>\n(.*?)\n</parameter>\n", re.DOTALL)


def ask(messages: list[dict[str, str]]) -> str:
    """The policy's next answer. Its sampling is the recipe's: the request names messages and nothing else."""
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        data=json.dumps({"model": TASK["model"], "messages": messages}).encode(),
        headers={"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def docker(*words: str, text: str | None = None) -> str:
    """Output of a docker command."""
    return subprocess.run([DOCKER, *words], input=text, capture_output=True, text=True).stdout


class Editor:
    """Views and edits files in the container."""

    def __init__(self, container: str) -> None:
        self.container, self.history = container, []

    def run(self, command: str, path: str, old_str: str = "", new_str: str = "", **other: str) -> str:
        """Carry out one call of the editor."""
        text = docker("exec", self.container, "cat", path)
        if command == "view":
            return text.removesuffix("\n")
        if command == "undo_edit":
            if not self.history:
                return "error: nothing to undo"
            self.write(*self.history.pop())
            return "undone"
        if command != "str_replace":
            return f"error: {command} is not offered"
        if text.count(old_str) != 1 or not old_str:
            num = text.count(old_str) if old_str else 0
            return f"error: old_str occurs {num} times" if num else "error: old_str not found"
        self.history.append((path, text))
        self.write(path, text.replace(old_str, new_str))
        return "edited"

    def write(self, path: str, text: str) -> None:
        """Write a whole file."""
        docker("exec", "-i", self.container, "sh", "-c", 'cat > "$0"', path, text=text)


def main() -> None:
    """Play one episode."""
    container = docker("run", "-d", "-w", TASK["workdir"], TASK["image"], "sleep", "1h").strip()
    editor = Editor(container)
    messages = [{"role": "user", "content": TASK["problem_statement"]}]
    while True:
        answer = ask(messages)
        messages.append({"role": "assistant", "content": answer})
        calls = CALL.findall(answer)
        for name, text in calls:
            arguments = dict(PARAMETER.findall(text))
            if name == "finish":
                return
            if name == "execute_bash":
                said = docker("exec", container, "bash", "-c", arguments["command"]).removesuffix("\n")
            else:
                said = editor.run(**arguments)
            messages.append({"role": "tool", "content": said})
        if not calls:
            messages.append({"role": "tool", "content": "error: no tool call; call a tool, or finish"})


if __name__ == "__main__":
    main()
