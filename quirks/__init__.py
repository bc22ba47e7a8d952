"""The registry's data: one TOML file a quirk, under cuda/, rocm/, ascend/ and any/ (every backend). No code here."""
