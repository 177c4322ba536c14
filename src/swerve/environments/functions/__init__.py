"""The `functions` family: short functions of real packages, broken in one place, with the packages' own tests."""
