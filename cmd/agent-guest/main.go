// Command agent-guest runs inside a session's VM. Package guestd describes what it does.
package main

import (
	"os"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestd"
)

// version is set when the program is built for a release.
var version = "dev"

func main() {
	os.Exit(guestd.Main(version, os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}
