# Headers, library, command, pkg-config file and CMake package.
include(CMakePackageConfigHelpers)
install(TARGETS moe4 EXPORT moe4Targets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/moe4 DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(TARGETS moe4_command RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
