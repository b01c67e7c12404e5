"""What is on this wire, and can this machine capture: inspect, doctor, remedies."""
