"""What a training run starts from, by digest: tasks, policy, prompts, images of sandboxes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swerve.cli.composition import load_template
from swerve.sandboxes import image_digests
from swerve.telemetry import file_digest, folder_facts

if TYPE_CHECKING:
    from swerve.cli.training import TrainingInputs


def input_digests(inputs: TrainingInputs) -> dict[str, object]:
    """What provenance keeps of a run's inputs.

    Args:
        inputs: Read and checked.

    Returns:
        JSON values. Of the policy's files, large ones are told by their size, and by the digests that a list beside
        them has; of the sandboxes' images, their names and digests as far as they are on record.
    """
    recipe, policy, tasks = inputs.recipe, inputs.policy, inputs.tasks
    template = load_template(recipe.agent.template)
    return {
        "tasks": {
            split: {"file": str(path), "bytes": path.stat().st_size, "sha256": file_digest(path), "used": len(used)}
            for split, path, used in zip(
                ("train", "validation"), tasks.files, (tasks.train, tasks.validation), strict=True
            )
        },
        "policy": {"directory": str(policy.directory), "files": folder_facts(policy.directory)},
        "tokenizer_sha256": policy.tokenizer.sha256,
        "template": {
            "name": template.name,
            "sha256": template.sha256,
            "system_prompt_sha256": template.system_prompt_sha256,
        },
        "sandbox_images": image_digests(recipe.sandbox.backend, recipe.sandbox.images),
    }
