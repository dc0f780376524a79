"""Price and search the strategies that today's trainers can run."""
