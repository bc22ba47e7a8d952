"""Used instructions that the ISA oracle has no definition of, and why: (pattern, reason, what tests them instead)."""

OUTSIDE: tuple[tuple[str, str, str], ...] = (
    (r"v_(mfma|wmma)_\w+", "the documents write D = A * B + C: neither the order of the sum nor its roundings, nor "
     "which lane holds what", "test_matrix_instructions.py; test_layouts.py against AMD's matrix calculator"),
    (r"scratch_(load|store)_\w+", "where a lane's own memory lies is prose; its bytes are addressed as those of others",
     "test_memory_instructions.py"),
    (r"ds_read_b64_tr_b16", "the documents have prose and a figure", "test_memory_instructions.py"),
    (r"ds_swizzle_b32", "the documents have prose and a table of its modes", "test_vector.py"),
    (r"s_wait\w+|s_nop|s_clause|s_delay_alu|s_set_inst_prefetch_distance|buffer_gl0_inv|global_inv",
     "no effect on values: order and time",
     "the check of waits: test_checks.py"),
    (r"s_barrier(_signal|_wait)?|s_endpgm|s_sendmsg", "the order of waves", "test_checks.py"),
)  # fmt: skip
