"""GPU clusters, their data sheets, and the alpha-beta cost of collectives."""
