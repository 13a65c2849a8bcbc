# The Python package as it is in the checkout, in build/python: its files and
# packages.
set(_package ${PROJECT_BINARY_DIR}/python/flatshard)
file(MAKE_DIRECTORY ${_package})
file(GLOB _linked ${_package}/*)
foreach(link ${_linked})
  if(NOT EXISTS ${link}) # of a file that moved
    file(REMOVE ${link})
  endif()
endforeach()
file(GLOB _modules CONFIGURE_DEPENDS LIST_DIRECTORIES true
     ${PROJECT_SOURCE_DIR}/python/flatshard/*)
list(FILTER _modules EXCLUDE REGEX "/__pycache__$")
foreach(module ${_modules})
  cmake_path(GET module FILENAME _name)
  file(CREATE_LINK ${module} ${_package}/${_name} SYMBOLIC)
endforeach()
