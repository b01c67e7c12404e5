"""Port mirroring on leaf switches: plan, render to vendor text, apply, read back, remove.

    planning/      Topology (file, LLDP) -> make_plan() -> MirrorPlan         no device, no side effect
    vendors/       MirrorSession -> render() -> text; read(): what a switch prints -> SessionState
    manage.py      Manager(session, transport): difference, apply, show, remove
    local.py       the same for software switches on this machine
    documents.py   YAML and JSON files, with errors that name the field
    schema.py      Topology, MirrorPlan, MirrorSession, SessionState
    transport.py   how lines reach a switch

Imports nothing else of this project. `flowcheck switch` is the command over it; docs/use/switch.md the manual.
"""
