"""What is decided once a prompt is known: scores by echo, and budgets of heads."""
