// Command agent-sessionizer gives every coding agent its own virtual machine.
package main

import (
	"os"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli"
)

func main() { os.Exit(cli.Main()) }
