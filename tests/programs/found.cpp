#include "tests/programs/found.h"

namespace flatshard::testing {

// A new one goes to the end: what was wrong, and what
// `random_programs_test --program FILE --shrink` printed.
const std::vector<FoundProgram>& found_programs() {
  static const std::vector<FoundProgram> programs{
      {"AllOperationsOnce",
       R"({"seed":1,"mesh":[2],"strategy":"zero3","prefetch":1,"reshard":true,
"granularity":"element","delay_us":30,"model":{"unit":true,"ops":[
{"op":"linear"},{"op":"child","a":0},{"op":"gain"}],"children":[
{"unit":true,"ops":[{"op":"linear"},{"op":"scalar"}],"children":[]}]},
"steps":[{"no_sync":false,"micro":["fb"]},{"no_sync":false,"micro":["fb"]}]})"},
      {"ViewThatIsChangedInPlaceKeptNoHook",
       R"({"seed":456,"mesh":[2,1],"strategy":"zero3","prefetch":0,
"reshard":true,"granularity":"element","delay_us":0,"model":{"unit":true,
"ops":[{"op":"child","a":0}],"children":[{"unit":false,
"ops":[{"op":"inplace_output","a":0}],"children":[{"unit":true,"ops":[
{"op":"linear","frozen":true},{"op":"linear"},{"op":"view"}],"children":[]}]}]},
"steps":[{"no_sync":false,"micro":["leaf_input"]}]})"},
      {"UnitCalledAgainReducedTwiceWhereItsParameterWasUnused",
       R"({"seed":35,"mesh":[1,2],"strategy":"hsdp_zero2","prefetch":0,
"reshard":true,"granularity":"element","delay_us":0,"model":{"unit":true,
"ops":[{"op":"child","a":0},{"op":"linear"},{"op":"child","a":0}],"children":[
{"unit":true,"ops":[{"op":"linear"},{"op":"child","a":0},{"op":"child","a":0}],
"children":[{"unit":true,"ops":[{"op":"sometimes"}],"children":[]}]}]},
"steps":[{"no_sync":false,"micro":["fb"]},{"no_sync":false,"micro":["fb"]}]})"},
      {"ParentThatReturnsItsChildsTensorBeganAfterTheChild",
       R"({"seed":123,"mesh":[1,2],"strategy":"hfsdp","prefetch":0,
"reshard":true,"granularity":"element","delay_us":0,"model":{"unit":true,
"ops":[{"op":"linear"},{"op":"child","a":0},{"op":"linear"}],"children":[
{"unit":true,"ops":[{"op":"child","a":0}],"children":[{"unit":false,"ops":[
{"op":"child","a":0},{"op":"linear"},{"op":"child","a":0},{"op":"sometimes"}],
"children":[{"unit":true,"ops":[{"op":"linear"}],"children":[]}]}]}]},
"steps":[{"no_sync":false,"micro":["fb"]},{"no_sync":false,"micro":["fb"]}]})"},
      {"UnitThatReturnsItsInputBeganTooLate",
       R"({"seed":206,"mesh":[2],"strategy":"zero3","prefetch":0,"reshard":true,
"granularity":"element","delay_us":0,"model":{"unit":true,"ops":[
{"op":"branch","a":0,"b":1},{"op":"linear"},{"op":"child","a":0},
{"op":"linear"}],"children":[{"unit":true,"ops":[{"op":"linear"}],
"children":[]},{"unit":true,"ops":[{"op":"sometimes"}],"children":[]}]},
"steps":[{"no_sync":false,"micro":["fb"]},{"no_sync":false,"micro":["fb"]}]})"},
      {"CheckpointOverTwoCallsCountedOneOfThem",
       R"({"seed":941,"mesh":[2],"strategy":"zero3","prefetch":0,"reshard":true,
"granularity":"element","delay_us":0,"model":{"unit":true,"ops":[
{"op":"checkpoint","a":0,"b":0},{"op":"child","a":0}],"children":[
{"unit":true,"ops":[{"op":"sometimes"}],"children":[]},{"unit":false,"ops":[],
"children":[{"unit":false,"ops":[{"op":"dead","a":1,"b":1}],"children":[]}]}]},
"steps":[{"no_sync":false,"micro":["fb"]}]})"},
      {"UnitThatReturnsTheInputOfItsCheckpointNeverBegan",
       R"({"seed":1514,"mesh":[2],"strategy":"zero2","prefetch":0,
"reshard":true,"granularity":"element","delay_us":0,"model":{"unit":true,
"ops":[{"op":"linear"},{"op":"checkpoint","a":0,"b":1},{"op":"linear"}],
"children":[{"unit":true,"ops":[{"op":"sometimes"}],"children":[]},
{"unit":false,"ops":[{"op":"linear"}],"children":[]}]},
"steps":[{"no_sync":false,"micro":["fb"]}]})"},
      {"UnitThatReturnsTheInputOfItsCheckpointOvertookTheOneBehindIt",
       R"({"seed":3492,"mesh":[1,2],"strategy":"hsdp_zero1","prefetch":0,
"reshard":true,"granularity":"element","delay_us":0,"model":{"unit":true,
"ops":[{"op":"child","a":1,"b":1}],"children":[{"unit":false,"ops":[
{"op":"linear"},{"op":"checkpoint","a":1,"b":0},{"op":"linear"}],"children":[
{"unit":true,"ops":[{"op":"linear"}],"children":[]},
{"unit":true,"ops":[{"op":"sometimes"}],"children":[]}]}]},
"steps":[{"no_sync":false,"micro":["fb"]}]})"},
      {"UnitWithoutAGradientOvertookWhatWasDueBeforeIt",
       R"({"delay_us":0,"granularity":"element","mesh":[2],"model":{"ops":[{
"op":"child","a":0},{"op":"child","a":1},{"op":"child","a":0}],"unit":true
,"children":[{"children":[{"children":[{"children":[],"ops":[{
"op":"linear"},{"op":"linear"}],"unit":false},{"children":[{"children":[],
"ops":[{"op":"linear"}],"unit":true},{"children":[],"ops":[{
"op":"sometimes"}],"unit":true}],"ops":[{"op":"linear"},{"op":"linear"},{
"op":"linear"},{"a":1,"b":0,"op":"child"},{"a":2,"b":1,"op":"child"}],
"unit":false},{"children":[],"ops":[],"unit":true}],"ops":[{"a":2,"b":1,
"op":"child"},{"op":"linear"},{"op":"linear"},{"a":1,"b":2,"op":"child"},{
"op":"linear"}],"unit":false}],"ops":[{"a":0,"b":0,"op":"checkpoint"}],
"unit":true},{"children":[{"children":[{"children":[],"ops":[{"op":"emit"}
],"unit":false}],"ops":[{"a":0,"b":0,"op":"child"}],"unit":false}],"ops":[
{"a":0,"b":2,"op":"child"}],"unit":false}]},"prefetch":0,"reshard":true,
"seed":295,"steps":[{"micro":["fb"],"no_sync":false}],"strategy":"zero2"})"},
  };
  return programs;
}

}  // namespace flatshard::testing
