# Headers, library, command, man pages, shell completion, pkg-config file and CMake package.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/moe4)

install(TARGETS moe4 EXPORT moe4Targets
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/moe4 DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN *.h)

# The command finds its library wherever the two are moved together.
file(RELATIVE_PATH bin_to_lib ${CMAKE_INSTALL_FULL_BINDIR} ${CMAKE_INSTALL_FULL_LIBDIR})
set_target_properties(moe4_command PROPERTIES INSTALL_RPATH $ORIGIN/${bin_to_lib})
install(TARGETS moe4_command RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(FILES ${PROJECT_SOURCE_DIR}/cli/completion.bash
    DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME moe4)

# docs/man/NAME.SECTION.scd
find_program(SCDOC scdoc)
file(GLOB man_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/docs/man/*.scd)
if(SCDOC AND man_sources)
    foreach(source IN LISTS man_sources)
        cmake_path(GET source STEM LAST_ONLY name)
        cmake_path(GET name EXTENSION LAST_ONLY section)
        string(REPLACE . man section ${section})
        set(page ${PROJECT_BINARY_DIR}/man/${section}/${name})
        add_custom_command(OUTPUT ${page} DEPENDS ${source} VERBATIM
            COMMAND ${CMAKE_COMMAND} -E make_directory ${PROJECT_BINARY_DIR}/man/${section}
            COMMAND ${SCDOC} < ${source} > ${page})
        list(APPEND man_pages ${page})
    endforeach()
    add_custom_target(man ALL DEPENDS ${man_pages})
    install(DIRECTORY ${PROJECT_BINARY_DIR}/man/ DESTINATION ${CMAKE_INSTALL_MANDIR})
endif()

# Relative to where the file lies, so that an installed tree can be moved.
file(RELATIVE_PATH pkgconfig_to_prefix ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
string(REGEX REPLACE "/$" "" pkgconfig_to_prefix ${pkgconfig_to_prefix})
file(RELATIVE_PATH prefix_to_include ${CMAKE_INSTALL_PREFIX} ${CMAKE_INSTALL_FULL_INCLUDEDIR})
file(RELATIVE_PATH prefix_to_lib ${CMAKE_INSTALL_PREFIX} ${CMAKE_INSTALL_FULL_LIBDIR})
configure_file(${CMAKE_CURRENT_LIST_DIR}/moe4.pc.in moe4.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/moe4.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

install(EXPORT moe4Targets NAMESPACE moe4:: DESTINATION ${package_dir})
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/moe4Config.cmake.in moe4Config.cmake
    INSTALL_DESTINATION ${package_dir} NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(moe4ConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/moe4Config.cmake ${PROJECT_BINARY_DIR}/moe4ConfigVersion.cmake
    DESTINATION ${package_dir})
