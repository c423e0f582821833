// Command agent-sessionizer gives every coding agent a virtual machine of its own.
package main

import (
	"os"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli"
)

func main() { os.Exit(cli.Main()) }
