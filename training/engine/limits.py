"""What a run's folder can hold, for the options of the command, which import no torch."""

MOST_KEPT = 24  # rounds; with the last committed one and the one under way, as many slots as letters
