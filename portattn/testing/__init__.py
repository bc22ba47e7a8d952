"""The float64 oracle, error budgets, random calls and canaries."""
