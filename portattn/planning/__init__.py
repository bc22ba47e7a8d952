"""From a problem and a target to a plan. Nothing here compiles or launches."""
