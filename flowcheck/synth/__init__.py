"""flowcheck.synth"""
