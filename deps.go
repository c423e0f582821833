//go:build deps

package sessionizer

import (
	_ "charm.land/lipgloss/v2"
	_ "github.com/1password/onepassword-sdk-go"
	_ "github.com/creack/pty"
	_ "github.com/goccy/go-yaml"
	_ "github.com/lima-vm/lima/pkg/hostagent"
	_ "github.com/lima-vm/lima/pkg/hostagent/api/server"
	_ "github.com/lima-vm/lima/pkg/instance"
	_ "github.com/lima-vm/lima/pkg/snapshot"
	_ "github.com/miekg/dns"
	_ "github.com/rogpeppe/go-internal/testscript"
	_ "github.com/spf13/cobra"
	_ "github.com/spf13/cobra/doc"
	_ "github.com/spf13/viper"
	_ "golang.org/x/crypto/ssh"
	_ "golang.org/x/sync/errgroup"
	_ "golang.org/x/sys/unix"
	_ "golang.org/x/term"
	_ "modernc.org/sqlite"
)
