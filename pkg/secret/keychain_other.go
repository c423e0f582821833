//go:build !linux

package secret

// storeInKeychain is the command that stores an entry.
const storeInKeychain = "security add-generic-password -s %s -a %s -w"

func findKeychain() error { return nil }

// describeKeychain returns the message for an error of the keychain: the exit status of
// macOS's security command.
func describeKeychain(err error) (message, hint string) {
	return "the keychain is locked, or refuses access: " + err.Error(), "security unlock-keychain"
}
