"""Isolated, throw-away workspaces in which agents act and graders grade.

This package owns the sandbox protocol, the pool that starts sandboxes, its backends (bubblewrap with a warm
interpreter, Apptainer, Docker and Podman, plain processes), and the probe that says what a machine offers. It knows
nothing of tasks, agents or models; whatever runs inside a sandbox is described by a `SandboxImage`.
"""

from swerve.sandboxes.backends import BACKENDS, Backend, image_digests, make_backend
from swerve.sandboxes.pool import SandboxPool
from swerve.sandboxes.protocol import (
    WORKDIR,
    CallCrashedError,
    CallError,
    CallExitedError,
    CallRaisedError,
    CallTimeoutError,
    ExecResult,
    Json,
    Mount,
    Sandbox,
    SandboxFileError,
    SandboxImage,
    SandboxLimits,
    SandboxLostError,
    read_files,
)

__all__ = [
    "BACKENDS",
    "WORKDIR",
    "Backend",
    "CallCrashedError",
    "CallError",
    "CallExitedError",
    "CallRaisedError",
    "CallTimeoutError",
    "ExecResult",
    "Json",
    "Mount",
    "Sandbox",
    "SandboxFileError",
    "SandboxImage",
    "SandboxLimits",
    "SandboxLostError",
    "SandboxPool",
    "image_digests",
    "make_backend",
    "read_files",
]
