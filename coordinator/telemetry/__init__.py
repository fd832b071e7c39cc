"""What is counted, timed and written down about requests and lanes: metrics, journal, traces."""
