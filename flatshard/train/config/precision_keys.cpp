#include "flatshard/train/config/precision_keys.h"

#include "flatshard/train/config/key_rows.h"

namespace flatshard::config {
namespace {

constexpr UsedIf kHasFloat8{
    "float8.recipe",
    WHEN(c.float8.recipe.has_value()),
    "runs with FP8 weights; set float8.recipe"};

const ConfigKey kPrecisionKeys[] = {
#define KEY(...) KEY_ROW(precision, __VA_ARGS__)
#define INHERITED(...) KEY_OF_MEMBER(precision, __VA_ARGS__)
#include "flatshard/train/config/sections/precision.def"
#define KEY(...) KEY_ROW(float8, __VA_ARGS__)
#include "flatshard/train/config/sections/float8.def"
};

}  // namespace

KeyTable precision_keys() {
  return {kPrecisionKeys};
}

}  // namespace flatshard::config
