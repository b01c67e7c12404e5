"""Mirror configuration of switches: plan, vendor text, apply, show, remove. Imports nothing of ours."""
