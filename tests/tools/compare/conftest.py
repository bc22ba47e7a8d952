"""The command line, for the tests of comparisons."""

from planted import portattn as portattn
