# cmake --install: the libraries, their headers, the program, and a package that
# find_package(flatshard) reads. Included last, when every target is known.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(_package ${CMAKE_INSTALL_LIBDIR}/cmake/flatshard)

get_property(_libraries GLOBAL PROPERTY FLATSHARD_LIBRARIES)
# The command line is a program, not something to link to.
list(REMOVE_ITEM _libraries flatshard_cli)

add_library(flatshard_all INTERFACE)
set_target_properties(flatshard_all PROPERTIES EXPORT_NAME flatshard)
target_link_libraries(flatshard_all INTERFACE ${_libraries} flatshard_torch)
target_compile_features(flatshard_all INTERFACE cxx_std_20)
target_include_directories(
  flatshard_all INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>
                          $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)

install(
  TARGETS flatshard_all flatshard_torch flatshard_fmt ${_libraries}
  EXPORT flatshardTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(
  EXPORT flatshardTargets
  NAMESPACE flatshard::
  DESTINATION ${_package})
install(
  DIRECTORY ${PROJECT_SOURCE_DIR}/flatshard
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  FILES_MATCHING
  PATTERN "*.h"
  PATTERN "*.def")

configure_package_config_file(
  cmake/flatshardConfig.cmake.in ${PROJECT_BINARY_DIR}/flatshardConfig.cmake
  INSTALL_DESTINATION ${_package})
write_basic_package_version_file(
  ${PROJECT_BINARY_DIR}/flatshardConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(
  FILES ${PROJECT_BINARY_DIR}/flatshardConfig.cmake
        ${PROJECT_BINARY_DIR}/flatshardConfigVersion.cmake
        ${PROJECT_SOURCE_DIR}/cmake/torch_targets.cmake
  DESTINATION ${_package})

if(TARGET flatshard)
  install(TARGETS flatshard RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  # The part of the Python package that the program runs.
  set(_python share/flatshard/python/flatshard)
  install(TARGETS flatshard_corpus LIBRARY DESTINATION ${_python})
  install(
    FILES ${PROJECT_SOURCE_DIR}/python/flatshard/_run.py
          ${PROJECT_SOURCE_DIR}/python/flatshard/prepare.py
          ${PROJECT_SOURCE_DIR}/python/flatshard/import_tokens.py
    DESTINATION ${_python})
  install(
    DIRECTORY ${PROJECT_SOURCE_DIR}/python/flatshard/_data
    DESTINATION ${_python}
    FILES_MATCHING
    PATTERN "*.py")
endif()
