"""Speech to text: Whisper with drafts, by Whisper's own rules."""
