"""What the fuzzer calls: one module per target, each with one(bytes). See docs/understand/fuzzing.md."""
