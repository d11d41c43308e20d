"""Trainers that people use: one module each, which alone imports the trainer's package."""
