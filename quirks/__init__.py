"""The registry's data: one TOML file a quirk, in a folder named after its backend; any/ concerns all. No code here."""
