// Package a0env gives the process a $HOME and a $USER before Lima's packages
// initialise.
//
// Lima's limayaml and osutil call Must(os.UserHomeDir()) and Must(user.Current()) in
// package variables. A binary that links them therefore panics before main under an
// empty environment, even for --help. Go initialises the packages that are ready in
// the order of their import paths. This one imports only the standard library and
// sorts before github.com/lima-vm, so it comes first. It must never import anything
// else.
package a0env

import (
	"os"
	"os/user"
)

// The project's rules forbid init functions; this one is the package's purpose.
func init() {
	noHome := os.Getenv("HOME") == ""
	if noHome {
		setenv("HOME", "/")
	}
	if os.Getenv("USER") == "" {
		setenv("USER", "unknown")
	}
	// Only now, because user.Current keeps its first answer, and without $HOME and
	// $USER that is an error for a uid without a passwd entry.
	if u, err := user.Current(); noHome && err == nil && u.HomeDir != "" {
		setenv("HOME", u.HomeDir)
	}
}

func setenv(key, value string) {
	if err := os.Setenv(key, value); err != nil {
		panic(err) // only for a malformed key
	}
}
