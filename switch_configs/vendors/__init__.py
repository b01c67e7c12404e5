"""What each platform is sent and what it answers: its text, by template, and parsers of what it prints.

Pure functions of a session and of a switch's output; manage.py types the lines.
"""
