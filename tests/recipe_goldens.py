"""Every benchmark recipe as resolved, kept to be compared byte for byte; `make goldens` writes them anew."""

from pathlib import Path

from swerve.config import read_recipe, render

ROOT = Path(__file__).parents[1]
GOLDENS = Path(__file__).with_name("goldens")
RECIPES = {
    path.name: path for path in [*sorted(ROOT.glob("recipes/mlperf/*.toml")), ROOT / "recipes/qwen35_35b_v5p128.toml"]
}
"""Recipes by the names of their goldens."""


def main() -> None:
    """Writes what is missing or differs, and removes what is of no recipe."""
    for path in GOLDENS.glob("*.toml"):
        if path.name not in RECIPES:
            path.unlink()
    for name, path in RECIPES.items():
        (GOLDENS / name).write_text(render(read_recipe(path)), encoding="utf-8")


if __name__ == "__main__":
    main()
