"""The doctor in the tasks of a step: four tiers, each only if the one before is sound.

examine    the entry: this rank leads or follows
rank       what each rank does: its report, links, import of torch, collectives
leader     rank 0: it gathers the reports of a tier, judges them, and tells the others whether to continue
follower   another rank: it reports and does what it is told
place      which rank this is, also where the environment does not say it
exchange   how messages pass: hub is rank 0's side, spoke that of another rank
facts      tier 1: what each rank reads for the comparison
compare    tier 1: what only all reports together show
links      tier 2: connections between nodes
training   tiers 3 and 4: collectives, and a step of DDP
"""
