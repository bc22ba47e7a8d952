"""Whether results are right: the float64 oracle, error budgets, random calls, canaries."""
