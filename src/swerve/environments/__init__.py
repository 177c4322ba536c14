"""Owns what the policy is trained and tested on: tasks, the factory that mints them, and the graders.

A task file is read strictly by `tasks`; each family (`functions`, `mini`) says how its sandboxes are laid out; the
grader turns an agent's edit into a reward in a fresh sandbox.
"""

from swerve.environments.grading import Environment, Grader, GradeResult
from swerve.environments.splits import hold_out
from swerve.environments.tasks import (
    REPAIR_FILE,
    SPLITS,
    find_task,
    gold_text,
    load_split,
    load_tasks,
    save_tasks,
    shipped_file,
    task_from_json,
    task_to_json,
)

__all__ = [
    "REPAIR_FILE",
    "SPLITS",
    "Environment",
    "GradeResult",
    "Grader",
    "find_task",
    "gold_text",
    "hold_out",
    "load_split",
    "load_tasks",
    "save_tasks",
    "shipped_file",
    "task_from_json",
    "task_to_json",
]
