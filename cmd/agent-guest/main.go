// Command agent-guest runs inside a session's VM. Package guestagent describes what it
// does.
package main

import (
	"os"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent"
)

// version is set when the program is built for a release.
var version = "dev"

func main() {
	os.Exit(guestagent.Main(version, os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}
