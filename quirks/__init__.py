"""The registry's data: a TOML file for each quirk, in a folder named after its backend; any/ concerns all. No code."""
