"""MLPerf Training: this package owns logs, the rules a scored run obeys, the checkers, and the submission tree."""
