// Stand-in, see README.md. Torch's header needs nothing of it.
#pragma once
