"""The entries that mutants stand for: published bugs of such libraries, defects in their code, and laws of this one.

S-entries are public reports of training that continued with a wrong number (a report is its author's claim until a fix
confirms it). R-entries were found by reading source code. L-entries are promises of this library that no report covers.
"""

from __future__ import annotations

from dataclasses import dataclass

REPOSITORIES = {
    "ACC": "huggingface/accelerate",
    "AREAL": "areal-project/AReaL",
    "AUTO": "NVIDIA-NeMo/Automodel",
    "BNB": "bitsandbytes-foundation/bitsandbytes",
    "CAI": "hpcaitech/ColossalAI",
    "COMP": "mosaicml/composer",
    "DS": "deepspeedai/DeepSpeed",
    "ENTR": "paiml/entrenar",
    "FS": "facebookresearch/fairscale",
    "HF": "huggingface/transformers",
    "IL": "instructlab/training",
    "KF": "KempnerInstitute/KempnerForge",
    "MAXT": "AI-Hypercomputer/maxtext",
    "META": "facebookresearch/metaseq",
    "MILD": "radixark/miles_diffusion",
    "MILES": "radixark/miles",
    "ML": "NVIDIA/Megatron-LM",
    "MLF": "radixark/Megatron-LM",
    "NC": "karpathy/nanochat",
    "NEOX": "EleutherAI/gpt-neox",
    "ORB": "google/orbax",
    "OTAU": "TensorAuto/OpenTau",
    "PICO": "huggingface/picotron",
    "PL": "Lightning-AI/pytorch-lightning",
    "PRIME": "PrimeIntellect-ai/prime-rl",
    "PT": "pytorch/pytorch",
    "RETU": "rwth-i6/returnn",
    "RL": "NVIDIA-NeMo/RL",
    "RLINF": "RLinf/RLinf",
    "RLX": "redai-studio/Relax",
    "SKY": "NovaSky-AI/SkyRL",
    "SPD": "goodfire-ai/spd",
    "SPEC": "vllm-project/speculators",
    "SWIFT": "modelscope/ms-swift",
    "TE": "NVIDIA/TransformerEngine",
    "TREC": "meta-pytorch/torchrec",
    "TRT": "NVIDIA/TensorRT-LLM",
    "TT": "pytorch/torchtitan",
    "TUNE": "meta-pytorch/torchtune",
    "UNI": "Tencent-Hunyuan/UniRL",
    "VEO": "ByteDance-Seed/VeOmni",
    "VERL": "langfengQ/verl-agent",
    "VMLX": "osaurus-ai/vmlx-swift",
}


@dataclass(frozen=True)
class Entry:
    """A bug or a promise.

    ``sources``: "DS#7718" is an issue, "DS!7718" a pull request. An entry without a mutant ``waits`` for a feature or
    is ``impossible`` for a reason.
    """

    text: str
    sources: tuple[str, ...] = ()
    waits: str = ""
    impossible: str = ""


ENTRIES: dict[str, Entry] = {
    # gradients and accumulation
    "S1": Entry("each backward resets the accumulator; the last micro-batch alone counts", ("DS#7718", "ACC#3877")),
    "S2": Entry("copies to the host at the wrong micro-step after the first step", ("DS!6550",)),
    "S3": Entry("a parameter without a gradient in one micro-batch breaks accumulation", ("DS!545",)),
    "S4": Entry("the last micro-batch is not reduced; ranks differ", ("DS!7985",)),
    "S5": Entry("`zero_grad` is skipped, and gradients keep the loss scale", ("DS#7837", "DS!7839")),
    "S6": Entry("stages give different losses, more so with accumulation", ("DS#966", "DS#1488")),
    "S7": Entry("the accumulated shard is scaled instead of the new bucket: 1/W compounds", ("ML!3023",)),
    "S8": Entry("a group of one rank doubles the gradient at each micro-batch", ("ML#6660",)),
    "S9": Entry("a new gradient overwrites the accumulated one", ("IL#414",)),
    "S10": Entry("gradients are never synchronised where the shard dimension is 1", ("PT#154888",)),
    "S11": Entry("the backend's mean is a sum: gradients times W", ("PT#162338", "PT!99964")),
    "S12": Entry("with accumulation all outputs are 0 after a step (no cause given: the symptom)", ("CAI#2496",)),
    "S13": Entry("a fused path goes around the reduce-scatter: unreduced gradients", ("TE!2698",)),
    "S14": Entry(
        "partial sums of an embedding that pipeline stages share are added",
        ("ML#844",),
        impossible="there is no pipeline parallelism; a tied parameter is one parameter, whose uses autograd adds up",
    ),
    "S15": Entry("ranks whose graphs differ update the shards of one parameter unevenly", ("PT!174862",)),
    "S16": Entry("local token counts normalise the loss before it is averaged", ("HF#34242", "TT!1803")),
    "S17": Entry("from the second step on views are made at the wrong place of the flat buffer", ("ML#5787",)),
    # races, buffers, overlap
    "S18": Entry("a buffer under way is recycled by the allocator", ("DS!7965",)),
    "S19": Entry("one of several streams is waited for", ("DS#8061",)),
    "S20": Entry("a data race under overlap", ("DS#5545",)),
    "S21": Entry("the bucket size changes convergence", ("DS#6351",)),
    "S22": Entry("results differ with overlap on and off", ("NEOX#1004",)),
    "S23": Entry("gathered parameters are read before the copy is done", ("DS#5059",)),
    "S24": Entry("a wrong count of requests that are waited for", ("FS#241", "FS!242", "FS#1172")),
    "S25": Entry("the copy back from the host is not synchronised", ("DS!3097", "DS#1643")),
    "S26": Entry("stale parameters stay in buckets, with re-entrant checkpointing", ("DS!7780",)),
    "S27": Entry("more than 2^31 - 1 elements: writes out of bounds", ("SWIFT!10023",)),
    # norms, clipping, scaling
    "S28": Entry("the clip coefficient is not applied correctly", ("DS!5150",)),
    "S29": Entry("the norm is wrong where buckets are on", ("FS#517", "FS!518")),
    "S30": Entry("the infinity norm is always 1", ("TREC!3199",)),
    "S31": Entry("clipping uses the local norm", ("PT#170862", "MILD!35")),
    "S32": Entry("a tied copy counts twice in the norm", ("ML!7228",)),
    "S33": Entry("replicated parameters are counted more or less than once", ("ML!5916", "ML!6470")),
    "S34": Entry("unused parameters break the norm (there, where gradients are on the host)", ("DS#5241",)),
    "S35": Entry("an overflow enters the momentum before the step is discarded", ("DS#8432",)),
    "S36": Entry("norm and step both prepare the gradients: unscaled twice (here: divided twice)", ("RLX!44",)),
    "S37": Entry("the declared dtype of a reduction is not honoured", ("PT#190626", "PT#186998")),
    "S38": Entry("fresh and accumulated gradients differ in dtype", ("PT#196996",)),
    "S39": Entry("an upcast to fp32 master weights does nothing", ("ACC#3979",)),
    # the update itself
    "S40": Entry("a fake step that makes the state advances Adam's count", ("PT#164929", "TT!4382", "ML!5976")),
    "S41": Entry("the wrong partition is copied back: a fraction is trained", ("DS!2058",)),
    "S42": Entry("the last rank's rows are never updated", ("PT#176076",)),
    "S43": Entry("the first iterations do not update (ZeroRedundancyOptimizer with overlap, documented)"),
    "S44": Entry("matrices that cross partitions are orthogonalised partly reduced", ("DS#7807",)),
    "S45": Entry("orthogonalised at each micro-batch instead of each step", ("DS!8600",)),
    "S46": Entry("the geometry of matrices is lost, and updates come twice, with offload", ("DS!8464",)),
    "S47": Entry("which 8-bit states stay fp32 depends on wrapping", ("BNB!2081",)),
    "S48": Entry("the optimizer that was asked for is silently another", ("ACC#1902",)),
    "S49": Entry("a subset is given, and all parameters are optimized", ("COMP!3502",)),
    "S50": Entry("tied weights are silently untied", ("RL#227",)),
    "S51": Entry(
        "the scheduler is stepped more often with more processes",
        ("ACC!2304",),
        impossible="the library never steps a scheduler: torch's own act on the live param groups",
    ),
    # checkpoints
    "S52": Entry("a loop over nothing: training goes on from another state", ("ML!6920",)),
    "S53": Entry("the step, or what param groups hold, is not restored", ("DS!4396", "DS!5289")),
    "S54": Entry("the owner's copy is stale after weights alone were loaded", ("DS!762", "DS#2101", "DS!4141")),
    "S55": Entry("frozen weights are lost", ("DS#3090",)),
    "S56": Entry(
        "parameters are told apart by `data_ptr()`, which is 0 for several", ("DS#1896", "DS!3033", "DS#1317")
    ),
    "S57": Entry("the loader silently drops the moments", ("AREAL!1468",)),
    "S58": Entry("resuming differs where rows do not divide by the ranks", ("TT#1136",)),
    "S59": Entry("a forward for evaluation corrupts the checkpoint of narrow copies", ("PT#104770",)),
    "S60": Entry("padding in optimizer checkpoints", ("ML!5898",)),
    "S61": Entry("a strict load succeeds into the wrong layers", ("ML#7452",)),
    "S62": Entry("a newer scheduler state is saved with an older model", ("VEO!1181",)),
    "S63": Entry("a checkpoint can be resumed with as many ranks as saved it alone", ("DS#2898",)),
    "S64": Entry(
        "converted, it resumes as from scratch, with wrong values on several hosts, or looks for files of other ranks",
        ("DS#6691", "DS!7601", "DS!7599"),
    ),
    "S65": Entry(
        "what one rank has is stored as common to all; empty slices are unknown at the load", ("MLF!66", "PT#108869")
    ),
    "S66": Entry("the format is that of the insides: older states cannot be loaded any more", ("SKY!1268",)),
    "S67": Entry("of several parts of one tensor the last one is written (torch's writer of safetensors)"),
    "S68": Entry("scalars are dropped, zeroed or crash where files are put together", ("AUTO!301", "PT#192485")),
    "S69": Entry(
        "a save in the background has the values of the next step; a load right after it", ("PT#144657", "TT#930")
    ),
    "S70": Entry(
        "killed while saving: half a file has the final name; an incomplete folder is the newest",
        ("PL#688", "PL#19970", "HF#35782", "SPEC!739"),
    ),
    "S71": Entry("older checkpoints are removed before the new one is on the disk", ("KF#102",)),
    "S72": Entry("a save that failed is remembered: it is restored, and later ones are refused", ("MAXT!5260",)),
    "S73": Entry("a checkpoint is overwritten in place; a mixture of both loads (torch.distributed.checkpoint)"),
    "S74": Entry("what a commit depends on is not synced", ("VERL!237", "PT#183878")),
    "S75": Entry(
        "a changed bit loads in silence, a file that was cut off reads as zeros", ("TT#4011", "VMLX!217", "TRT!17368")
    ),
    "S76": Entry("to load a checkpoint runs its code", ("PT#189308", "PT!195600")),
    "S77": Entry("a generator's state is refused, the error swallowed: the stream is a fresh one", ("RLX!317",)),
    "S78": Entry(
        "a full disk ends the process, an error of the disk the run; files without bytes stay",
        ("PT!175248", "RETU#1829", "META#53"),
    ),
    "S79": Entry(
        "one rank fails, and the others run into a time limit without its cause",
        ("TUNE#2093", "SPD!536", "AUTO!3248"),
    ),
    "S80": Entry("one rank puts everything together: it has no memory for that", ("AUTO#1093",)),
    "S81": Entry("a save in the background and training use one process group: they wait for each other", ("KF#104",)),
    "S82": Entry("the same by a group that was kept from before", ("UNI!410",)),
    "S83": Entry("who writes has died, and training waits for ever", ("SKY!1960",)),
    "S84": Entry("memory grows with every save", ("PT#170163",)),
    "S85": Entry(
        "retention counts saves under way, removes what the user put there, fails on what is gone",
        ("TT!4197", "ORB#394", "HF#48315"),
    ),
    "S86": Entry("ranks save to different paths; in none there is everything", ("OTAU!396",)),
    "S87": Entry(
        "options of param groups and states that some parameters lack are mixed up between ranks, or lost",
        ("PT!127071", "PT#192224", "PT#192225", "TUNE#2553", "PT#121519"),
    ),
    "S88": Entry("a load casts the states to the parameter's dtype", ("PT#43706", "TT!4615", "FS#50")),
    "S89": Entry("the first step after a load has the options of before it", ("ML!7468",)),
    "S90": Entry("a save or a load takes a step", ("PT#164929", "PT!125708")),
    "S91": Entry(
        "one rank's random generators are restored on all ranks, or those of several are mixed",
        ("ML!6858", "MILES!3187", "RLINF!1570"),
    ),
    "S92": Entry("one of several random generators is not restored, and nothing is said", ("ACC#4283", "ACC#3960")),
    "S93": Entry(
        "the position in the data is another rank's, that of the beginning, or not saved",
        ("PRIME!1035", "ACC!4071", "ACC#2016", "KF#51", "ENTR#294"),
    ),
    "S94": Entry("at another number of ranks the positions of some ranks in the data are lost", ("TT#811", "TT!816")),
    "S95": Entry("a load needs the memory of a second copy", ("ML#2339", "PT#110479")),
    "S96": Entry(
        "elastic runs: a dead node goes unnoticed, a signal ends the rendezvous for good, orphans keep training",
        ("PT#111646", "PT#67742", "PT#147064"),
    ),
    "S97": Entry("the time follows the number of tensors; every rank reads the same bytes", ("PT!193909",)),
    # read in source code
    "R1": Entry("DeepSpeed: the loss scale is updated, then used to unscale older gradients"),
    "R2": Entry("DeepSpeed stages 1, 2: `reduce_scatter=True` is an all-reduce: twice the traffic"),
    "R3": Entry("ColossalAI: as R1"),
    "R4": Entry("ZeroRedundancyOptimizer: a global rank is taken for the rank in the group"),
    "R5": Entry("FairScale ShardedDDP: a group's index is compared with a global rank; the owner drops its gradient"),
    "R6": Entry("FairScale OSS: the norm is summed over the world whatever the group"),
    "R7": Entry("ColossalAI: returns before a collective where a rank has no gradients; adds norms, not squares"),
    "R8": Entry("nanotron: equal splits against uneven offsets"),
    "R9": Entry("nanotron: the last key of a state alone is flattened for the checkpoint"),
    "R10": Entry("nanotron: writes files under one name, looks for another"),
    "R11": Entry("picotron: the hook averages the parameter instead of its gradient", ("PICO#39",)),
    "R12": Entry("picotron, FairScale: `no_sync` without `finally`"),
    "R13": Entry("modded-nanogpt: states are keyed by `id(p)`"),
    "R14": Entry("DeepSpeed: padding is uninitialised memory"),
    "R15": Entry("FairScale: an exact fit is rejected by a bucket"),
    "R16": Entry(
        "FairScale: an AttributeError while a ValueError is raised",
        impossible="its failure is an AttributeError, which is no kill here; `test_errors` exercises the messages",
    ),
    "R17": Entry("FSDP1: ranks with the same shapes in another order", ("PT!75902",)),
    "R18": Entry("Megatron: the constructor of one instance changes another"),
    # promises that cover several entries
    "P24": Entry("degenerate shapes train as any other: one rank, one rank to a copy, one copy, 2 x 2 (S8, S10)"),
    "P27": Entry("what a rank holds at its peak is no more than the formulas say", ("NC#566",)),
    "P31": Entry("one content: the bytes of a checkpoint do not depend on who wrote it"),
    "P32": Entry("a checkpoint is loaded at any topology, and training goes on as if undisturbed"),
    "P33": Entry("a checkpoint is read, and trained on, without this library"),
    "P34": Entry("what is committed is the state at the save, whatever follows"),
    "P36": Entry("whenever ranks die, the newest checkpoint is whole, and not older than the last that was reported"),
    "P37": Entry("all that a commit depends on is synced before the rename, and the rename after it"),
    "P38": Entry("a changed, missing, added or shortened file is an error that names it, and never another bit"),
    "P39": Entry("a checkpoint is data: nothing is unpickled, imported, or opened outside its folder"),
    "P40": Entry("whatever call of the disk fails, training goes on, and older checkpoints stay"),
    "P41": Entry("what fails on one rank is known to every rank in the next step, with its cause"),
    "P42": Entry("saves send no message but one exchange, and none from a thread"),
    "P43": Entry("retention keeps what was asked for, and touches nothing else"),
    "P44": Entry("ranks agree on path, step and state before a byte is written"),
    "P45": Entry("states, options with their types, schedulers, aliases, buffers: everything comes back"),
    "P46": Entry("each rank has its own random streams back, or none, which is said"),
    "P47": Entry("a resumed run takes each micro-batch once"),
    "P48": Entry("after any sequence of kills and sizes parameters and losses are those of the undisturbed run"),
    "P49": Entry("processes of an older generation neither write nor remove"),
    "P50": Entry("a save or a load needs no memory for a copy of the states"),
    "P51": Entry("the work of a save is linear in its files, and saves leave nothing behind"),
    "P52": Entry("a run that saves has the bits and the messages of one that does not"),
    "P53": Entry("a newer version of the format is one error"),
    "P54": Entry("loaded at another precision, the wide weights and states are rounded once"),
    "P55": Entry("a save makes its step the newest; a branch that a run has left is set aside by name, and never lost"),
    "P56": Entry("what a file system lacks is done otherwise, with one warning, or refused with the reason"),
    # laws of this library
    "L1": Entry("the plain loop's arithmetic: order of sums, true division, -0.0 for nothing, cuts that no sum sees"),
    "L2": Entry("a gradient or parameter that a rank shows is right, or it is loud"),
    "L3": Entry("an exception leaves an object that can go on"),
    "L4": Entry("who is trainable is asked at each backward, and equal on all ranks"),
    "L5": Entry("memory in use is waited for, not reused, and never shows an old or another's value"),
    "L6": Entry("collectives are launched in layout order, units gathered one ahead"),
    "L7": Entry("a rank holds no more than the formulas say, whatever it does"),
    "L8": Entry("every rank enters every collective; an error reaches all ranks, with its reason"),
    "L9": Entry("optimizers side by side do not read each other's messages"),
    "L10": Entry("construction makes rank 0's values everybody's"),
    "L11": Entry("no gradient is not a gradient of zero"),
    "L12": Entry("the class and its param groups are the user's: live, whole, stepped to its own bits or refused"),
    "L13": Entry("edits from outside count, or are told"),
    "L14": Entry("a rank without batches takes part in all that the others do, with nothing of its own"),
    "L15": Entry("what computes in 16 bits is cast, rounded once from wide weights, which follow what is written"),
    "L16": Entry("one loss scale on all ranks, and one verdict on what is not finite"),
    "L17": Entry("ranks that hold the same slices have the same sums, and what is kept of a unit is the unit"),
    "L18": Entry("what is kept on disk has its room from the start, and is in memory only while it is stepped"),
    "L19": Entry("a model that was built without memory gets the values of plain construction, a bucket at a time"),
    "L20": Entry("one run writes into a folder of checkpoints"),
    "L21": Entry("a step launches what its budget allows, and looks at a device as rarely"),
}


def link(source: str) -> str:
    """Return a source as a Markdown link."""
    mark = "#" if "#" in source else "!"
    key, number = source.split(mark)
    repository = REPOSITORIES[key]
    kind = "issues" if mark == "#" else "pull"
    return f"[{repository.split('/')[1]} {number}](https://github.com/{repository}/{kind}/{number})"
