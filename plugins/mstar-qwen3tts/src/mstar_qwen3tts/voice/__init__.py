"""Node `VoiceEncoder`: a recording to a speaker vector and its codes."""
