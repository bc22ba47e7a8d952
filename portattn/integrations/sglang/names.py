"""What the plug-in is called, and the versions of SGLang that it is for. Imports nothing."""

NAME = "portattn"
WHO = "portattn.integrations.sglang"
# Versions that tests/engines/sglang/ ran with: the first and the last of them.
OLDEST, NEWEST = "0.5.20", "0.5.23"
