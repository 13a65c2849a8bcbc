# A wheel holds these in addition to the package's Python files, the component
# `python` of cmake --install: the extension, its build settings and the
# program. Included when every target is known.
install(TARGETS flatshard_extension DESTINATION flatshard COMPONENT python
        EXCLUDE_FROM_ALL)
install(FILES ${PROJECT_BINARY_DIR}/python/flatshard/_build.py
        DESTINATION flatshard COMPONENT python EXCLUDE_FROM_ALL)
install(TARGETS flatshard_corpus DESTINATION flatshard COMPONENT python
        EXCLUDE_FROM_ALL)
install(TARGETS flatshard RUNTIME DESTINATION flatshard/bin COMPONENT python
        EXCLUDE_FROM_ALL)
# In a wheel it finds torch and NVIDIA's libraries next to the package.
set(_rpath ${FLATSHARD_LIBRARY_FOLDERS})
list(TRANSFORM _rpath PREPEND "\\$ORIGIN/../../")
list(JOIN _rpath ":" _rpath)
install(
  CODE "file(RPATH_SET FILE \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/flatshard/bin/flatshard\"
       NEW_RPATH \"${_rpath}\")"
  COMPONENT python EXCLUDE_FROM_ALL)
if(SKBUILD)
  install(PROGRAMS ${PROJECT_SOURCE_DIR}/python/flatshard_script.py
          RENAME flatshard DESTINATION ${SKBUILD_SCRIPTS_DIR} COMPONENT python)
endif()
