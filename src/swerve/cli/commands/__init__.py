"""One module per command: `swerve NAME` is the module `NAME` (a dash in the name is an underscore in the module's).

A module dropped here is registered by being here. It has

    - a docstring, whose first line is the command's summary in `swerve --help`, and whose rest opens its own help;
    - `add_arguments(parser: argparse.ArgumentParser) -> None`;
    - `run(arguments: argparse.Namespace) -> int | None`, the exit code, where `None` is 0.

Summaries are read from the source, so `swerve --help` imports no command; whatever a command needs that is slow to
import, it imports inside `run`. Faults a user can act on are raised as `SwerveError` and become one line and exit code
2 (`MachineError`: 1). A command with a recipe takes its arguments from `swerve.cli.recipe_arguments`:

    def add_arguments(parser):
        add_recipe_arguments(parser, TrainRecipe)

    def run(arguments):
        recipe = recipe_from(arguments, TrainRecipe)
        if arguments.dry_run:
            print(dry_run_text(recipe, extra={"parameters": 5_000_000}))

Return:
        ...
"""
