"""What the agents' programs of the tests have in common: an OpenAI client and docker, by the standard library alone."""

import json
import os
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

TASK = json.loads(Path(os.environ["SWERVE_TASK_FILE"]).read_text())
START = [{"role": "system", "content": "You repair."}, {"role": "user", "content": TASK["problem_statement"]}]
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


def request(path, body=None, key=None):
    """Status and body of a response."""
    asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path)
    asked.add_header("Authorization", f"Bearer {key or os.environ['OPENAI_API_KEY']}")
    if body is not None:
        asked.data = json.dumps(body).encode()
        asked.add_header("Content-Type", "application/json")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(asked, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def chat(messages, **settings):
    """The answer to a conversation: what a client reads of it."""
    status, text = request("/chat/completions", {"model": "swerve", "messages": messages, **settings})
    answer = json.loads(text)
    assert status == 200, (status, answer)
    return answer


def say(messages, **settings):
    """Ask for an answer, append it to the conversation and return its text."""
    message = chat(messages, **settings)["choices"][0]["message"]
    messages.append(message)
    return message["content"]


def user(text):
    return {"role": "user", "content": text}


def docker(*words, **settings):
    return subprocess.run(["docker", *words], capture_output=True, text=True, **settings)


def start(*words):
    """Begin to use the sandbox; returns its id."""
    done = docker("run", "-d", *words, TASK["image"], "sleep", "2h")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def bash(container, command):
    return docker("exec", container, "bash", "-lc", command)
