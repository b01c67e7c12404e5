"""The way of a gradient from streams of packets to a version: plan, scheduler, evidence, verdict, replica."""
