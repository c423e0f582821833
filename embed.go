// Package sessionizer embeds the files that the binary ships: the VM template, the guest's
// provision scripts and dotfiles, and the default configuration.
//
// It owns nothing else and imports no other package of the product.
package sessionizer

import "embed"

// Lima holds the directory lima: the VM template.
//
//go:embed all:lima
var Lima embed.FS

// Provision holds the directory provision: the scripts and files that turn a machine into a
// session's guest.
//
//go:embed all:provision
var Provision embed.FS

// Config holds the directory config: the shipped defaults.
//
//go:embed all:config
var Config embed.FS
