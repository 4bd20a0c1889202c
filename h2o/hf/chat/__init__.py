"""Chats as token ids: the chat template, the span of the system turn, the ids of the next turn."""
